"""The mark that a replacement function carries, by which any copy of this package recognises it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

ATTRIBUTE = "__megacpp_seam__"
"""Name under which a replacement carries its mark."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The mark of a replacement, by which any copy of the loader recognises it and can undo it."""

    overlay_id: str
    original: Any
    """The raw attribute that was replaced."""
    inherited: bool
    """Whether the owner had no attribute of its own, so that undoing deletes ours."""
    made: Any
    """The function that carries this mark. `functools.wraps` copies marks; a copy does not count."""
    module: str = ""
    """Target module of the overlay: an overlay with several parts has one id. Empty where an older copy made it."""
    calls: Any = None
    """Counter of calls, see `calls.Calls`. None where an older copy made it, which has no such field either."""


def plain_function(raw: Any) -> Any:
    """Return the function inside a staticmethod, classmethod or property; anything else as it is."""
    # By type: a proxy answers isinstance() for the wrapped object, and may raise.
    if issubclass(type(raw), staticmethod | classmethod):
        return raw.__func__
    if issubclass(type(raw), property):
        return raw.fget
    return raw


_MOST_WRAPPERS = 16


def wrapped(raw: Any) -> Iterator[Any]:
    """Yield the function of an attribute, then each function along its `__wrapped__` chain."""
    each = plain_function(raw)
    for _ in range(_MOST_WRAPPERS):
        yield each
        try:
            inner = getattr(each, "__wrapped__", None)
        except Exception:  # noqa: BLE001 - a third-party object; attribute access may raise
            return
        if inner is None:
            return
        each = plain_function(inner)


def mark_behind(raw: Any) -> Mark | None:
    """Return the first mark along the `__wrapped__` chain of an attribute, or None."""
    return next((mark for each in wrapped(raw) if (mark := mark_of(each)) is not None), None)


def mark_of(raw: Any) -> Mark | None:
    """Return the mark of a replacement, or None for any other attribute."""
    function = raw if type(raw) is FunctionType else plain_function(raw)
    if type(function) is not FunctionType:  # a proxy answers for the wrapped object
        return None
    mark: Mark | None = getattr(function, ATTRIBUTE, None)  # vars() would give every function a dictionary
    # By name: another copy of this package may have set it.
    return mark if type(mark).__name__ == Mark.__name__ and getattr(mark, "made", None) is function else None
