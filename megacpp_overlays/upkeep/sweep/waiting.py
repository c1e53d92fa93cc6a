"""Who waits on which upstream thread, and whether what they say of it is still so."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from megacpp_overlays import overlays as own_overlays
from megacpp_overlays.model import Overlay, Thread
from megacpp_overlays.repro import inventory, pack_file
from megacpp_overlays.repro.inventory import Pack
from megacpp_overlays.upkeep.sweep.lookup import version_of
from megacpp_overlays.upkeep.sweep.threads import CLOSED, DRAFT, MERGED, OPEN, Answer, Key


@dataclass(frozen=True, slots=True)
class Declared:
    """What one declaration says of a thread, and where it says so."""

    state: str
    where: str
    """`overlays/x.py`, or `packs/NN-slug/pack.toml`."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """One thread with all that wait on it."""

    key: Key
    overlays: tuple[Overlay, ...]
    """The first part of each."""
    packs: tuple[Pack, ...]
    """Packs that name it and have no overlay that does."""
    declared: tuple[Declared, ...]

    def __str__(self) -> str:
        return f"{self.key[0]}#{self.key[1]}"

    def waiters(self) -> str:
        """Name the overlays and packs in one line."""
        return ", ".join([*(each.id for each in self.overlays), *(f"pack {each.number:02}" for each in self.packs)])


def listed(overlays: Sequence[Overlay], folder: Path) -> tuple[Waiting, ...]:
    """Return every thread that an overlay or the `pack.toml` of a pack names, by repository and number.

    Raises:
        PackError: a `pack.toml` is not what it should be.
    """
    first = {overlay.id: overlay for overlay in reversed(overlays)}
    by_overlay: dict[Key, dict[str, Overlay]] = {}
    by_pack: dict[Key, list[Pack]] = {}
    declared: dict[Key, dict[Declared, None]] = {}
    for overlay in overlays:
        for thread in overlay.threads:
            by_overlay.setdefault(_key(thread), {})[overlay.id] = first[overlay.id]
            declared.setdefault(_key(thread), {})[Declared(thread.state, _declaration(overlay))] = None
    for pack in inventory.list_packs(folder):
        for thread in _threads(pack):
            where = f"packs/{pack.name}/{pack_file.NAME}"
            by_pack.setdefault(_key(thread), []).append(pack)
            declared.setdefault(_key(thread), {})[Declared(thread.state, where)] = None
    return tuple(
        Waiting(
            key,
            tuple(by_overlay.get(key, {}).values()),
            tuple(_without(by_pack.get(key, ()), by_overlay.get(key, {}).values())),
            tuple(declared[key]),
        )
        for key in sorted(declared)
    )


def _key(thread: Thread) -> Key:
    return thread.repository, thread.number


def _threads(pack: Pack) -> tuple[Thread, ...]:
    there = (pack.folder / pack_file.NAME).exists()
    return pack_file.read(pack.folder).threads if there else ()


def _without(packs: Iterable[Pack], overlays: Iterable[Overlay]) -> Iterable[Pack]:
    numbers = {overlay.pack for overlay in overlays}
    return (pack for pack in dict.fromkeys(packs) if pack.number not in numbers)


def _declaration(overlay: Overlay) -> str:
    name = overlay.id.replace("-", "_")
    ours = importlib.util.find_spec(f"{own_overlays.__name__}.{name}") is not None
    return f"overlays/{name}.py" if ours else f"the declaration of {overlay.id}"


_STATES = (
    ("not merged", {OPEN, DRAFT, CLOSED}),
    ("open draft", {DRAFT}),
    ("open", {OPEN, DRAFT}),
    ("draft", {DRAFT}),
    ("closed", {CLOSED}),
    ("merged", {MERGED}),
)
"""How a declared state begins, and the states that it agrees with."""
_DAY = r"(\d{4}-\d{2}-\d{2})"


def contradiction(text: str, answer: Answer) -> str | None:
    """Return what is not as a declared state says, or None.

    An answer that is older than a day which the text names says nothing against it. Two days that differ by one are
    the same: whoever read the thread may live in another time zone.
    """
    newest = max((date.fromisoformat(day) for day in re.findall(_DAY, text)), default=date.min)
    if answer.state is None or answer.checked < newest:
        return None
    words = next(((word, states) for word, states in _STATES if text.startswith(word)), None)
    wrong = []
    if words and answer.state not in words[1]:
        wrong.append(f"is {answer.sentence()}")
    elif answer.state in {MERGED, CLOSED}:
        when = answer.merged if answer.state == MERGED else answer.closed
        said = re.match(rf"{answer.state}(?: to \w+)? {_DAY}", text)
        if said and when and abs((date.fromisoformat(said[1]) - when).days) > 1:
            wrong.append(f"was {answer.state} {when}")
    branch = re.search(r"\bto (main|dev)\b", text)
    if answer.state == MERGED and branch and answer.base and answer.base != branch[1]:
        wrong.append(f"went to {answer.base}")
    wrong += _release(text, answer)
    return "; ".join(wrong) or None


def _release(text: str, answer: Answer) -> list[str]:
    said = re.search(r"\bin (\d+(?:\.\d+)+\w*)", text)
    if answer.released_in is None:
        never = said and answer.state == MERGED and answer.releases_checked and not answer.prerelease
        return [f"is in no release on {answer.releases_checked}"] if never else []
    if (said and said[1] != version_of(answer.released_in)) or "unreleased" in text:
        return [f"is in {answer.released_in}"]
    return []
