"""Waves: the ready packs that are sent together, and when.

A wave goes to one repository and has two to four packs, so that its maintainers can look at every one of them; a pause
of some days lies between waves. A repository with more than four gets several waves, of sizes as even as they can be,
so that none is left over. One pack alone is no wave: it waits for company, which costs little, and a plan says so.
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megacpp_overlays.repro.pack_file import PRIORITIES

SMALLEST, LARGEST = 2, 4
PAUSES = (2, 3)
"""Days from one wave to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyPack:
    """A pack that is ready."""

    number: int
    repository: str
    priority: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Packs that are sent on one day, in this order."""

    date: datetime.date
    repository: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every candidate, in a wave or waiting."""

    waves: tuple[Wave, ...]
    waiting: Mapping[int, str]
    """Why, by number of the pack."""


def plan(candidates: Iterable[ReadyPack], start: datetime.date, pause: int = PAUSES[0]) -> Plan:
    """Group packs into waves; the same packs give the same plan, in whatever order they come.

    Args:
        candidates: ready packs, each number once.
        start: day of the first wave.
        pause: days from one wave to the next, 2 or 3.

    Raises:
        ValueError: the pause is another one, or a pack has a priority that is never sent.
    """
    if pause not in PAUSES:
        raise ValueError(f"a pause of {pause} days is none of {', '.join(map(str, PAUSES))}")
    targets: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for each in candidates:
        targets[each.repository].append((_rank(each), each.number))
    waiting = {}
    batches = []
    for repository, packs in targets.items():
        if len(packs) < SMALLEST:
            waiting[packs[0][1]] = f"the only ready pack for {repository}: it waits for a second one"
            continue
        for turn, batch in enumerate(_evenly(sorted(packs))):
            batches.append((batch[0][0], turn, batch[0][1], repository, tuple(number for _, number in batch)))
    # What stops a run goes first; with equal rank the first wave of each repository comes before any second one.
    waves = tuple(
        Wave(date=start + datetime.timedelta(days=pause * index), repository=repository, numbers=numbers)
        for index, (*_, repository, numbers) in enumerate(sorted(batches))
    )
    return Plan(waves=waves, waiting=dict(sorted(waiting.items())))


def _rank(candidate: ReadyPack) -> int:
    if candidate.priority not in PRIORITIES[:-1]:
        raise ValueError(f"pack {candidate.number:02}: priority {candidate.priority} is never sent")
    return PRIORITIES.index(candidate.priority)


def _evenly(packs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    count = -(-len(packs) // LARGEST)
    size, more = divmod(len(packs), count)
    batches, begin = [], 0
    for index in range(count):
        end = begin + size + (index < more)
        batches.append(packs[begin:end])
        begin = end
    return batches
