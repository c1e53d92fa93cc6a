"""Retired overlays, which were deleted because upstream is right without them; `megacpp-overlays retire` adds an entry.

The entries serve four purposes: a launcher that still switches a retired overlay off can start, its reproducer stays as a
regression test, its id is not used again, and the ledger's history is made of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from megacpp_overlays.model import Target, Thread

FILE = Path(__file__).with_name("retired.json")
"""A list of objects whose keys are the fields of `RetiredOverlay`; it is read on demand."""


class RetiredOverlay(NamedTuple):
    """The entry of a retired overlay."""

    id: str
    pack: int
    date: str
    """Day of the retirement, as 2026-11-21."""
    distribution: str
    version: str
    """Release of the distribution that made the overlay unnecessary."""
    why: str
    """The condition for its deletion, as the overlay declared it."""
    targets: tuple[Target, ...]
    """Targets of the overlay, one for each of its parts."""
    threads: tuple[Thread, ...]
    """Upstream threads, and their states on that day."""

    def __str__(self) -> str:
        return f"{self.id} was retired on {self.date}, with {self.distribution} {self.version}"


def read() -> tuple[RetiredOverlay, ...]:
    """Return the entries, the oldest first."""
    return tuple(
        RetiredOverlay(
            **entry
            | {
                "targets": tuple(Target(**target) for target in entry["targets"]),
                "threads": tuple(Thread(**thread) for thread in entry["threads"]),
            }
        )
        for entry in json.loads(FILE.read_text(encoding="utf-8"))
    )


def to_json(entries: Iterable[RetiredOverlay]) -> str:
    """Return the text of a file with these entries, from which `read` returns equal entries."""
    rows = [
        each._asdict()
        | {
            "targets": [target._asdict() for target in each.targets],
            "threads": [thread._asdict() for thread in each.threads],
        }
        for each in entries
    ]
    return json.dumps(rows, indent=2, ensure_ascii=False) + "\n"


def find(overlay_id: str) -> RetiredOverlay | None:
    """Return the entry of a retired overlay, or None."""
    return next((each for each in read() if each.id == overlay_id), None)
