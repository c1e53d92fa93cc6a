"""Repairs that releases have, by overlay, each with edits that leave or bring back the defect.

A repair is a file in `repairs`, named as the module of its probe; its `REPAIR` is a case.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from edited_code import Case, Edit, appended, archive
from tilelang_files import OLD_COPY, OLD_REDUCE, REDUCE, UTILS, switched_on

__all__ = [  # `otherwise_cases` has these names from here
    "ATTACHED_GLOBALLY",
    "CASES",
    "COUNTED",
    "OLD_COPY",
    "OLD_REDUCE",
    "REDUCE",
    "REFRESHED",
    "UTILS",
    "Case",
    "Edit",
    "appended",
    "archive",
    "switched_on",
]

REPAIRS = sorted(path.stem for path in Path(__file__).with_name("repairs").glob("*.py"))
CASES: dict[str, Case] = {name.replace("_", "-"): importlib.import_module(f"repairs.{name}").REPAIR for name in REPAIRS}

# Places of megatron-core that are broken as they are, for `otherwise_cases`.
REFRESHED = "            self.optimizer.update_fp32_param_by_new_param()\n            return\n"
ATTACHED_GLOBALLY = (
    "        probs = self.attach_and_log_load_balancing_loss(\n            probs,\n            global_aux_loss_coeff,\n"
)
COUNTED = "        self.step(increment=num_steps)\n"
