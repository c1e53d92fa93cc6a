"""Run a script, and write which modules of this checkout it loaded: `observed_imports.py FILE SCRIPT WORDS...`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _loaded() -> set[str]:
    """Return the files of all modules that are in this checkout and in no environment of it."""
    files = {str(getattr(module, "__file__", None)) for module in [*sys.modules.values()]}
    return {each for each in files if each.startswith(f"{ROOT}/") and "site-packages" not in each} - {__file__}


if __name__ == "__main__":
    into, script, *_ = words = sys.argv[1:]
    sys.argv = words[1:]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        Path(into).write_text("\n".join(sorted(_loaded() - {script})))
