"""The upstream threads that overlays and packs wait on, with the place of each declaration."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_overlays import overlays as own_overlays
from megacpp_overlays.model import Erratum, Thread
from megacpp_overlays.repro import inventory, pack_file
from megacpp_overlays.repro.inventory import Pack
from megacpp_overlays.upkeep.sweep.threads import Key


@dataclass(frozen=True, slots=True)
class ThreadMention:
    """The state of a thread in one declaration, and the place of the declaration."""

    state: str
    """The state in the declaration's own words."""
    where: str
    """The file of the declaration: `overlays/x.py`, or `packs/NN-slug/pack.toml`."""


@dataclass(frozen=True, slots=True, eq=False)
class WatchedThread:
    """One thread with all overlays and packs that wait on it."""

    key: Key
    overlays: tuple[Erratum, ...]
    """The first part of each overlay."""
    packs: tuple[Pack, ...]
    """Packs that name the thread and have no overlay that names it."""
    declared: tuple[ThreadMention, ...]

    def __str__(self) -> str:
        return f"{self.key[0]}#{self.key[1]}"

    def waiters(self) -> str:
        """Return the names of the overlays and packs in one line."""
        return ", ".join([*(each.id for each in self.overlays), *(f"pack {each.number:02}" for each in self.packs)])


def listed(overlays: Sequence[Erratum], folder: Path) -> tuple[WatchedThread, ...]:
    """Return every thread that an overlay or the `pack.toml` of a pack names, by repository and number.

    Raises:
        PackError: a `pack.toml` is invalid.
    """
    first = {overlay.id: overlay for overlay in reversed(overlays)}
    by_overlay: dict[Key, dict[str, Erratum]] = {}
    by_pack: dict[Key, list[Pack]] = {}
    declared: dict[Key, dict[ThreadMention, None]] = {}
    for overlay in overlays:
        for thread in overlay.threads:
            by_overlay.setdefault(_key(thread), {})[overlay.id] = first[overlay.id]
            declared.setdefault(_key(thread), {})[ThreadMention(thread.state, _declaration(overlay))] = None
    for pack in inventory.list_packs(folder):
        for thread in _threads(pack):
            where = f"packs/{pack.name}/{pack_file.NAME}"
            by_pack.setdefault(_key(thread), []).append(pack)
            declared.setdefault(_key(thread), {})[ThreadMention(thread.state, where)] = None
    return tuple(
        WatchedThread(
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


def _without(packs: Iterable[Pack], overlays: Iterable[Erratum]) -> Iterable[Pack]:
    numbers = {overlay.pack for overlay in overlays}
    return (pack for pack in dict.fromkeys(packs) if pack.number not in numbers)


def _declaration(overlay: Erratum) -> str:
    name = overlay.id.replace("-", "_")
    ours = importlib.util.find_spec(f"{own_overlays.__name__}.{name}") is not None
    return f"overlays/{name}.py" if ours else f"the declaration of {overlay.id}"
