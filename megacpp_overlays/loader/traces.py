"""Weak references to every place that an overlay patched.

A place is noted before it is changed, so that it is known whatever ends a change half-way. What is in it is told by the
mark of the function that is found there, not by what was remembered. A module that is executed again leaves nothing here
but references that die with what they refer to.
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
    """The places of one overlay, and the functions and classes that it met or made in any execution of its target."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], weakref.ref[Owner]] = {}
        self._objects: dict[int, weakref.ref[Any]] = {}

    def note(self, seam: Seam) -> None:
        """Remember a seam or an alias that is about to be put in."""
        for each in (seam.original_function, seam.function, seam.owner):
            if isinstance(each, FunctionType | type):
                self._objects[id(each)] = weakref.ref(each)
        self._places[id(seam.owner), seam.name] = weakref.ref(seam.owner)
        self._forget_the_dead()

    def places(self) -> Iterator[LiveName]:
        """Yield each place that still exists, the newest first."""
        for (_, name), reference in reversed(list(self._places.items())):
            if (owner := reference()) is not None:
                yield LiveName(owner, name)

    def objects(self) -> list[Any]:
        """Return the functions and classes that still exist."""
        return [each for reference in list(self._objects.values()) if (each := reference()) is not None]

    def has_seams(self) -> bool:
        """Return whether a function that was put in still exists, in whatever execution and under whatever name."""
        return any(mark_of(each) is not None for each in self.objects())

    def forget(self, place: LiveName) -> None:
        """Forget a place that holds what it held before."""
        self._places.pop((id(place.owner), place.name), None)

    def forget_what_was_overwritten(self) -> None:
        """Forget each place that leads to no seam any more: its module was executed again."""
        for place in self.places():
            if mark_behind(place.own) is None:
                self.forget(place)

    def _forget_the_dead(self) -> None:
        for place, owner in list(self._places.items()):
            if owner() is None:
                self._places.pop(place, None)
        for number, each in list(self._objects.items()):
            if each() is None:
                self._objects.pop(number, None)
