"""Imported last in a process that is copied: functions that upstream gives to `torch.compile` run as they are written.

Megatron compiles small functions around those that overlays replace. A C++ compiler then takes up to a minute in each process, for values
that differ in rounding alone. Tests of compiled steps take the stance `default`, or start without this module.
"""

from __future__ import annotations

import torch

torch.compiler.set_stance("force_eager")
