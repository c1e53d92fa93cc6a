"""Releases as folders: each wheel is unpacked once on this machine, under its hash, with the bytecode of imported modules."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from places import ROOT

FOLDER = ROOT / ".cache" / "unpacked"


@functools.cache
def unpacked(wheel: Path) -> Path:
    """Return a folder to put first on a path, with all files of a wheel. The folder must not be written into.

    Args:
        wheel: a release.
    """
    folder = FOLDER / f"{wheel.name.partition('-py')[0]}-{hashlib.sha256(wheel.read_bytes()).hexdigest()[:16]}"
    if not folder.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=FOLDER, prefix="."))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(draft)
        draft.chmod(0o755)
        try:
            os.rename(draft, folder)
        except OSError:
            shutil.rmtree(draft)
            if not folder.exists():
                raise
            # another worker was first
    return folder
