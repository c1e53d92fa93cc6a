"""Progress of a command that takes minutes: the number of finished items, their total, and an estimate of the time that is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_MINUTE = 60


class Progress:
    """Counter of finished items of a known number, for several threads.

    Args:
        total: number of items.
        clock: seconds.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._began = clock()
        self._done = 0
        self._lock = threading.Lock()

    def done(self, text: str) -> str:
        """Count one more, and return the line about it: `3 of 12: scheduler-restore: keep; about 4 min left`."""
        with self._lock:
            self._done += 1
            left = (self._clock() - self._began) / self._done * (self._total - self._done)
            rest = f"; about {_duration(left)} left" if self._done < self._total else ""
            return f"{self._done} of {self._total}: {text}{rest}"


def _duration(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / _MINUTE)} min"
