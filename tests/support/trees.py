"""Source trees that are no releases: our stand-ins, and real checkouts given with `--upstream-tree`.

A stand-in has the names, signatures and behaviour of a tree and none of its code. A test that asks for the fixture
`tree` runs on every stand-in and on every tree that was given, with the same assertions.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "stand_ins"
STAND_INS = {path.name: path for path in sorted(FOLDER.iterdir()) if path.is_dir() and path.name[0] not in "._"}
