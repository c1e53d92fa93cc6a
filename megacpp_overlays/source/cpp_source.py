"""Comparison of shipped text files, such as C++, without comments and layout."""

from __future__ import annotations

import re

from megacpp_overlays.model import Evidence
from megacpp_overlays.source.trees import ModuleSource, ShippedFile

_COMMENT = r"//[^\n]*|/\*.*?\*/"
"""Compiled at its first use: importing this module is part of every start."""


def at(file: ShippedFile | ModuleSource, mark: str, seen: str) -> Evidence:
    """Return evidence with the line of a mark, without one where the text has no such mark."""
    before, found, _ = file.text.partition(mark)
    return Evidence(seen=seen, file=file.path, line=before.count("\n") + 1 if found else None)


def plain(text: str) -> str:
    """Return a text without comments and with single spaces, so that layout does not count."""
    return " ".join(_without_comments(text).split())


def _without_comments(text: str) -> str:
    return re.sub(_COMMENT, "", text, flags=re.DOTALL)


def digest(text: str) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a text."""
    import hashlib  # noqa: PLC0415 - only where such a package is installed

    return hashlib.sha256(text.encode()).hexdigest()[:16]
