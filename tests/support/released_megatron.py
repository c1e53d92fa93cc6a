"""What a script says of a release of Megatron-Core as JSON, in a process of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import warm_python
from places import HANG_S, SUPPORT
from unpacked import unpacked


def said(wheel: Path, script: Path, *words: str | Path, **variables: str) -> Any:
    """Return what a script says of a release.

    Args:
        wheel: of the release, whose modules the script imports before any that are installed.
        script: in Python; it may import what is in `tests/support`.
        words: its arguments.
        variables: of its environment, beside those of this process.
    """
    path = os.pathsep.join([str(unpacked(wheel)), str(SUPPORT)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    done = warm_python.run(["-W", "ignore", script, *words], env, after=warm_python.MEGATRON, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
