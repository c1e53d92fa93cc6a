"""Turns: one thread at a time changes what a target has, and no interrupt keeps the others out for ever."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

_LOOK_SECONDS = 0.1


class Turns:
    """The turns at all targets.

    One lock a target, reentrant. A thread that settles one target may import a module that another thread is importing;
    with one lock for all targets, that thread could be waiting for us.

    Args:
        names: of the targets.
        changing: the functions in which somebody who has a turn changes something.
    """

    def __init__(self, names: Iterable[str], changing: Iterable[Callable[..., Any]]) -> None:
        self._names = tuple(names)
        self._codes = {each.__code__ for each in changing}
        self.renew()

    def renew(self) -> None:
        """Make fresh locks. A forked child needs them: a thread that it does not have may hold the old ones."""
        self.locks = {name: threading.RLock() for name in self._names}

    def at(self, name: str) -> Turn:
        """Return the turn at a target."""
        return Turn(self, name)

    def somebody_else_changes_something(self) -> bool:
        """Return whether another thread is in one of the functions that change something."""
        here = threading.get_ident()
        for thread, frame in sys._current_frames().items():  # noqa: SLF001 - documented, in spite of its name
            each: FrameType | None = frame
            while each is not None and thread != here:
                if each.f_code in self._codes:
                    return True
                each = each.f_back
        return False


class Turn:
    """The right to change what one target has: a reentrant lock, which survives an interrupt that keeps it locked."""

    def __init__(self, turns: Turns, name: str) -> None:
        self._turns = turns
        self._name = name
        self._held = turns.locks[name]

    def __enter__(self) -> None:
        while not self._held.acquire(timeout=_LOOK_SECONDS):
            # An interrupt may come between the last line of a block and the release. Then nobody is in there.
            if not self._turns.somebody_else_changes_something():
                self._turns.locks[self._name] = threading.RLock()
            self._held = self._turns.locks[self._name]

    def __exit__(self, *_: object) -> None:
        self._held.release()

    def take(self) -> bool:
        """Take it if it is free, and return whether it was; `with` and `give_back` end it."""
        return self._held.acquire(blocking=False)

    def give_back(self) -> None:
        """End what `take` began."""
        self._held.release()

    def is_taken(self) -> bool:
        """Return whether another thread has it."""
        if self.take():
            self.give_back()
            return False
        return self._turns.somebody_else_changes_something()
