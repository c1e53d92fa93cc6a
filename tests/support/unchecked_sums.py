"""Imported last in a process that is copied: Triton's interpreter assumes that no sum or product of integers overflows.

Its check after each one takes a third of its time. With the sizes of tests none can overflow.
"""

from __future__ import annotations

from triton.runtime import interpreter

object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
