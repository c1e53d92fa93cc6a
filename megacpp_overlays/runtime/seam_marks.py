"""The mark that a replacement function carries, by which any copy of this package recognises it."""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import Any

ATTRIBUTE = "__megacpp_seam__"
"""Name under which a replacement carries its mark."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What a replacement carries, so that any copy of the loader recognises it and can undo it."""

    overlay_id: str
    original: Any
    """The raw attribute that was there first."""
    inherited: bool
    """Whether the owner had no attribute of its own, so that undoing deletes ours."""
    made: Any
    """The function that carries this mark. `functools.wraps` copies marks; a copy does not count."""


def plain_function(raw: Any) -> Any:
    """Return the function inside a staticmethod, classmethod or property; anything else as it is."""
    if isinstance(raw, staticmethod | classmethod):
        return raw.__func__
    if isinstance(raw, property):
        return raw.fget
    return raw


def mark_of(raw: Any) -> Mark | None:
    """Return the mark of a replacement, or None for any other attribute."""
    function = plain_function(raw)
    if type(function) is not FunctionType:  # a proxy answers for what it wraps
        return None
    mark: Mark | None = vars(function).get(ATTRIBUTE)
    # By name: it may be another copy of this package that put it in.
    return mark if type(mark).__name__ == Mark.__name__ and getattr(mark, "made", None) is function else None
