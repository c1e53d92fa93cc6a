"""TargetLocks: one reentrant lock for each target, which survives an interrupt that keeps it locked.

A thread that settles one target may import a module that another thread is importing. With one lock for all targets, that
thread could be waiting for this one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, TypeVar

_LOOK_SECONDS = 0.1
_Function = TypeVar("_Function", bound=Callable[..., Any])
_changing: set[CodeType] = set()


def changes_target(function: _Function) -> _Function:
    """Declare that a function holds the lock of a target while it changes the target."""
    _changing.add(function.__code__)
    return function


def held_by_other_thread() -> bool:
    """Return whether another thread is in a function that changes a target."""
    here = threading.get_ident()
    for thread, frame in sys._current_frames().items():  # noqa: SLF001 - documented, in spite of its name
        each: FrameType | None = frame
        while each is not None and thread != here:
            if each.f_code in _changing:
                return True
            each = each.f_back
    return False


class TargetLocks:
    """The locks of all targets, by name."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self.renew()

    def renew(self) -> None:
        """Make fresh locks. A forked child needs them: a thread that it does not have may hold the old ones."""
        self.locks = {name: threading.RLock() for name in self._names}

    def at(self, name: str) -> TargetLock:
        """Return the lock of a target."""
        return TargetLock(self, name)


class TargetLock:
    """The lock of one target, as a context manager; a lock that an interrupt left locked is replaced."""

    def __init__(self, locks: TargetLocks, name: str) -> None:
        self._locks = locks
        self._name = name
        self._held = locks.locks[name]

    def __enter__(self) -> None:
        while not self._held.acquire(timeout=_LOOK_SECONDS):
            # An interrupt may come between the last line of a block and the release. Then no thread is in there.
            if not held_by_other_thread():
                self._locks.locks[self._name] = threading.RLock()
            self._held = self._locks.locks[self._name]

    def __exit__(self, *_: object) -> None:
        self._held.release()

    def try_acquire(self) -> bool:
        """Acquire it if it is free, and return whether it was; `release` ends that."""
        return self._held.acquire(blocking=False)

    def release(self) -> None:
        """Release what `try_acquire` acquired."""
        self._held.release()

    def is_taken(self) -> bool:
        """Return whether another thread holds it."""
        if self.try_acquire():
            self.release()
            return False
        return held_by_other_thread()
