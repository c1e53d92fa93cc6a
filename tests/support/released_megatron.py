"""A release of Megatron-Core, unpacked, and what a script says of it as JSON, in a process of its own."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import warm_python
from places import HANG_S, SUPPORT


def said(wheel: Path, folder: Path, script: Path, *words: str | Path, **variables: str) -> Any:
    """Return what a script says of a release.

    Args:
        wheel: of the release.
        folder: where to unpack its modules, which the script imports before any that are installed.
        script: in Python; it may import what is in `tests/support`.
        words: its arguments.
        variables: of its environment, beside those of this process.
    """
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    path = os.pathsep.join([str(folder), str(SUPPORT)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    done = warm_python.run(["-W", "ignore", script, *words], env, after=warm_python.MEGATRON, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
