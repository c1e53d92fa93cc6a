"""The lanes of a checkout that still need an overlay, because they would run unpatched without it."""

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
    UNKNOWN = "it is unknown whether it needs it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The need of one lane for an overlay."""

    name: str
    pinned: str
    """The targets that the lock pins, such as `liger-kernel 0.8.1`."""
    need: Need
    why: str


def of_checkout(root: Path) -> tuple[Lock, ...]:
    """Return the locks of lanes: `locks/*.txt` with a lane in the head.

    Raises:
        LockError: a lock cannot be read.
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
    """Yield for each lane whether it needs an overlay.

    The probe runs in the environment of a lane. Without an environment, the need is known only where the lane pins the
    same files as the lock for which the retirement has been proved.

    Args:
        overlay_id: the id of the overlay.
        distributions: the overlay's target distributions.
        lanes: the locks of the lanes, see `concerned`.
        proven: the lock for which the retirement has been proved.
        folder: the folder of environments.

    Raises:
        UpkeepError: an environment exists, and this package does not run in it.
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
    why = f"{probed.verdict.value}: {probed.evidence}"
    if probed.due or probed.verdict is Verdict.ABSENT:
        return Need.NO, why
    return (Need.UNKNOWN if probed.verdict is Verdict.UNRECOGNISED else Need.YES), why


def _is_same(one: Lock, other: Lock, distribution: str) -> bool:
    pins = one.pins.get(distribution), other.pins.get(distribution)
    return pins[0] is not None and pins[1] is not None and pins[0].hashes == pins[1].hashes
