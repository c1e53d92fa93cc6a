"""Overlays that are gone because upstream is right without them; `megacpp-overlays retire` adds an entry.

Whoever still names one is answered from here: a launcher that switches it off starts all the same, its reproducer runs
on as a regression guard, its id is not given away again, and the ledger's history is made of these entries.
"""

from __future__ import annotations

from typing import NamedTuple

from megacpp_overlays.model import Target, Thread


class Retired(NamedTuple):
    """What is kept of an overlay."""

    id: str
    pack: int
    date: str
    """Day of the retirement, as 2026-11-21."""
    distribution: str
    version: str
    """Release of the distribution that made the overlay unnecessary."""
    why: str
    """The condition that came true, as the overlay declared it."""
    targets: tuple[Target, ...]
    """What the overlay was about, one for each of its parts."""
    threads: tuple[Thread, ...]
    """Upstream threads, and their states on that day."""

    def __str__(self) -> str:
        return f"{self.id} was retired on {self.date}, with {self.distribution} {self.version}"


RETIRED: tuple[Retired, ...] = ()


def find(overlay_id: str) -> Retired | None:
    """Return the entry of a retired overlay, or None."""
    return next((each for each in RETIRED if each.id == overlay_id), None)
