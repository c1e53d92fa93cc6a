"""Repairs that releases have, by overlay, each with edits that leave or bring back the defect.

A repair is a file in `repairs`, named as the module of its probe; its `REPAIR` is a case.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from edited_code import Case

REPAIRS = sorted(path.stem for path in Path(__file__).with_name("repairs").glob("*.py"))
CASES: dict[str, Case] = {name.replace("_", "-"): importlib.import_module(f"repairs.{name}").REPAIR for name in REPAIRS}
