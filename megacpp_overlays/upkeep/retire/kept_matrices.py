"""What a kept matrix in a checkout says about one overlay: the release in which upstream repaired it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.version import InvalidVersion, Version

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.model import Verdict

NAMES = ("matrix.json", "matrix.html")


def folders(files: Iterable[str]) -> list[str]:
    """Return the folders of a checkout in which a matrix is kept."""
    return sorted({str(PurePosixPath(name).parent) for name in files if PurePosixPath(name).name == NAMES[0]})


def first_fixed(root: Path, kept: Iterable[str], overlay_id: str, pinned: str) -> str | None:
    """Return the release that turned to FIXED last and is no newer than the pinned one; None where no matrix says so.

    Raises:
        UpkeepError: a kept matrix cannot be read.
    """
    found = []
    for folder in kept:
        path = root / folder / NAMES[0]
        try:
            found += [flip["release"] for flip in _flips(json.loads(path.read_text())) if _is_repair(flip, overlay_id)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UpkeepError(f"{path}: this is no kept matrix: {error!r}") from error
    limit = _version(pinned)
    known = [version for version in map(_version, found) if version and limit and version <= limit]
    return str(max(known)) if known else None


def _flips(data: Any) -> list[dict[str, str]]:
    return [flip for table in data["distributions"] for flip in table["flips"]]


def _is_repair(flip: dict[str, str], overlay_id: str) -> bool:
    return flip["overlay"] == overlay_id and flip["after"] == Verdict.FIXED.value


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None
