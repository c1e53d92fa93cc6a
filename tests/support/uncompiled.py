"""Imported last of what a process is a copy of: what upstream gives to `torch.compile` runs as it is written.

Megatron compiles small functions around what overlays replace. A C++ compiler then takes up to a minute in each process, for values
that differ in rounding alone. What is about compiled steps takes the stance `default`, or starts without this.
"""

from __future__ import annotations

import torch

torch.compiler.set_stance("force_eager")
