"""Checks of processes that run or have ended, for tests of code that ends them."""

from __future__ import annotations

import time
from pathlib import Path

from places import HANG_S


def is_running(pid: int | str) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False


def demand_end(*pids: int | str) -> None:
    """Wait until processes have ended: a signal takes effect with a delay, and a busy host takes its time."""
    deadline = time.monotonic() + HANG_S
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, pids))
