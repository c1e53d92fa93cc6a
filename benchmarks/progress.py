"""Progress lines of a benchmark: the current measurement, its number of how many, and the time so far."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

_Step = TypeVar("_Step")


class Progress:
    """Lines on the standard error, each complete as soon as it is written."""

    def __init__(self) -> None:
        """Begin to count seconds."""
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self._started

    def each(self, steps: Iterable[tuple[str, _Step]]) -> Iterator[_Step]:
        """Yield steps, and print the name of each before it begins."""
        every = list(steps)
        for number, (name, step) in enumerate(every, start=1):
            say(f"[{number}/{len(every)}] {name} ({self.seconds:.0f} s so far)")
            yield step


def say(words: str) -> None:
    """Write one line now."""
    print(words, file=sys.stderr, flush=True)
