"""Arming of a process by the start-up file of its environment, see `startup_file`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megacpp_overlays.loader.session import Session

_PACKAGE = Path(__file__).absolute().parents[1]
_MOST_ENTRIES = 9
"""Limit on the entries of PYTHONPATH that are searched: build systems make longer ones."""


def arm(session: Session, path: str) -> None:
    """Arm a process at its start.

    Args:
        session: of this process.
        path: of the start-up file.
    """
    session.arm()
    for other in other_copies():
        session.log.other_copy(
            f"PYTHONPATH leads to another copy of this package, {other}, which is not used: {path} arms every Python of this "
            f"environment with {_PACKAGE}. Take that entry off PYTHONPATH, or `megacpp-overlays disable` and then enable that copy"
        )


def other_copies() -> list[Path]:
    """Return the copies of this package that PYTHONPATH leads to and that are not this one."""
    entries = [] if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "").split(os.pathsep)
    copies = [Path(entry, "megacpp_overlays") for entry in entries[:_MOST_ENTRIES] if entry]
    return [each for each in copies if (each / "__init__.py").is_file() and not each.samefile(_PACKAGE)]
