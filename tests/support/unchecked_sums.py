"""Imported last of what a process is a copy of: Triton's interpreter takes it that no sum or product of integers overflows.

It would ask after each one, which is a third of its time. With the sizes of tests none can.
"""

from __future__ import annotations

from triton.runtime import interpreter

object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
