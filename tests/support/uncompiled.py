"""Eager execution of everything that upstream compiles with `torch.compile`; imported after torch by a process that is forked for tests.

Megatron compiles small functions around those that overlays replace. A C++ compiler then takes up to a minute in each process, for values
that differ in rounding alone. Tests of compiled steps set the stance `default`, or start without this module.
"""

from __future__ import annotations

import torch

torch.compiler.set_stance("force_eager")
