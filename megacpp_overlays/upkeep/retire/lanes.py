"""The lanes of a checkout, and what an overlay is to each: which would run unpatched without it."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_overlays.errors import LockError
from megacpp_overlays.model import Verdict
from megacpp_overlays.upkeep import environments, evidence, locks
from megacpp_overlays.upkeep.locks import Lock

_IS_LANE = re.compile(r"^# lane: \S+$", re.MULTILINE)


class Need(enum.Enum):
    """Whether a lane needs an overlay."""

    NO = "needs it no more"
    YES = "needs it"
    UNKNOWN = "nobody knows whether it needs it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What an overlay is to one lane."""

    name: str
    pinned: str
    """The targets that the lock pins, such as `liger-kernel 0.8.1`."""
    need: Need
    why: str


def of_checkout(root: Path) -> tuple[Lock, ...]:
    """Return the locks that are lanes: `locks/*.txt` whose head names one.

    Raises:
        LockError: one of them cannot be read.
    """
    paths = sorted((root / "locks").glob("*.txt"))
    return tuple(locks.read(path) for path in paths if _IS_LANE.search(path.read_text(errors="replace")))


def concerned(distributions: Collection[str], lanes: Sequence[Lock], proven: Lock) -> list[Lock]:
    """Return the locks of the other lanes that pin a target of an overlay."""
    others = [lock for lock in lanes if lock.path.resolve() != proven.path.resolve()]
    return [lock for lock in others if any(name in lock.pins for name in distributions)]


def look(
    overlay_id: str, distributions: Collection[str], lanes: Sequence[Lock], proven: Lock, folder: Path
) -> Iterator[Lane]:
    """Yield what an overlay is to each of some lanes.

    An environment is asked where there is one. Without it, a lane is known only if it pins the very files of the lock
    for which the rest has been shown.

    Args:
        overlay_id: the overlay.
        distributions: its targets.
        lanes: their locks, see `concerned`.
        proven: the lock for which all has been shown.
        folder: where environments are.

    Raises:
        UpkeepError: an environment is there, and this package does not run in it.
    """
    for lock in lanes:
        pins = [lock.pins[name] for name in sorted(distributions) if name in lock.pins]
        pinned = ", ".join(f"{pin.name} {pin.version}" for pin in pins)
        need, why = _need(overlay_id, lock, folder)
        if need is Need.UNKNOWN and all(_is_same(lock, proven, name) for name in distributions):
            need, why = Need.NO, f"it pins the same files as {proven.path}"
        yield Lane(name=lock.lane, pinned=pinned, need=need, why=why)


def _need(overlay_id: str, lock: Lock, folder: Path) -> tuple[Need, str]:
    try:
        environment = environments.of(lock, folder=folder)
    except LockError as error:
        return Need.UNKNOWN, str(error).partition(": ")[2]
    probed = evidence.probe(environment)[overlay_id]
    if probed.due or probed.verdict is Verdict.ABSENT:
        return Need.NO, f"{probed.verdict.value}: {probed.evidence}"
    if probed.verdict is Verdict.UNRECOGNISED:
        return Need.UNKNOWN, f"UNRECOGNISED: {probed.evidence}"
    return Need.YES, f"{probed.verdict.value}: {probed.evidence}"


def _is_same(one: Lock, other: Lock, distribution: str) -> bool:
    pins = one.pins.get(distribution), other.pins.get(distribution)
    return pins[0] is not None and pins[1] is not None and pins[0].hashes == pins[1].hashes
