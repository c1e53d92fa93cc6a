"""Weak references to every place that an overlay patched.

A place is recorded before it is patched, so it is known even if the patch is interrupted. The mark of the function that
is there now, and not this record, decides whether a place holds a seam. After a module is executed again, references to
its old objects die with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from megacpp_overlays.loader.live_names import LiveName, Owner
from megacpp_overlays.loader.seams import Seam
from megacpp_overlays.runtime.seam_marks import mark_behind, mark_of


class Traces:
    """Places that one overlay patched, with the functions and classes there before and after, in any execution of its target."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], weakref.ref[Owner]] = {}
        self._objects: dict[int, weakref.ref[Any]] = {}

    def note(self, seam: Seam) -> None:
        """Record a seam or an alias before it is installed."""
        for each in (seam.original_function, seam.function, seam.owner):
            if isinstance(each, FunctionType | type):
                self._objects[id(each)] = weakref.ref(each)
        self._places[id(seam.owner), seam.name] = weakref.ref(seam.owner)
        self._forget_dead_references()

    def places(self) -> Iterator[LiveName]:
        """Yield each place that still exists, the newest first."""
        for (_, name), reference in reversed(list(self._places.items())):
            if (owner := reference()) is not None:
                yield LiveName(owner, name)

    def objects(self) -> list[Any]:
        """Return the functions and classes that still exist."""
        return [each for reference in list(self._objects.values()) if (each := reference()) is not None]

    def has_seams(self) -> bool:
        """Return whether any installed function still exists, in any execution and under any name."""
        return any(mark_of(each) is not None for each in self.objects())

    def forget(self, place: LiveName) -> None:
        """Forget a place that was restored."""
        self._places.pop((id(place.owner), place.name), None)

    def forget_overwritten(self) -> None:
        """Forget each place without a seam: its module was executed again."""
        for place in self.places():
            if mark_behind(place.own) is None:
                self.forget(place)

    def _forget_dead_references(self) -> None:
        for place, owner in list(self._places.items()):
            if owner() is None:
                self._places.pop(place, None)
        for number, each in list(self._objects.items()):
            if each() is None:
                self._objects.pop(number, None)
