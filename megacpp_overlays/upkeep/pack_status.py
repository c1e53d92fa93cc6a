"""Status of every pack: its manifest entry, the last known state of its upstream threads, and the next step.

A pack is filed by hand; CONTRIBUTING.md has the checklist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp_overlays.model import Erratum
from megacpp_overlays.repro import inventory, manifest, pack_file
from megacpp_overlays.repro.inventory import Pack
from megacpp_overlays.upkeep.sweep import threads
from megacpp_overlays.upkeep.sweep.threads import Answer, Key

READY = "ready"
_SENT = ("filed", "merged")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackThread:
    """An upstream thread of a pack, with its last known state."""

    name: str
    """`owner/name#12`."""
    state: str
    """The state that a sweep saved, or `unknown`."""
    checked: str | None
    """Day of the last check, as 2026-11-21; None where it was never checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackStatus:
    """Status of one pack."""

    pack: Pack
    entry: Mapping[str, Any]
    """The entry that the manifest should have."""
    problems: tuple[str, ...]
    """The problems of its claims, as reported by `receipts --check`."""
    threads: tuple[PackThread, ...]

    @property
    def has_reproducer(self) -> bool:
        """Whether there is a reproduce.py."""
        return self.pack.reproducer.is_file()

    @property
    def kept(self) -> tuple[int, int]:
        """Number of receipts, and of receipts of the present reproducer."""
        digest = inventory.digest(self.pack.reproducer)
        every = self.entry["receipts"]
        return len(every), sum(receipt["reproducer"] == digest for receipt in every)

    @property
    def next_step(self) -> str:
        """The next step, in one line."""
        if settled := self._settled():
            if self.entry["class"] == "regression guard" and not self.has_reproducer:
                return "needs a reproduce.py that shows BUG_NOT_PRESENT; there is nothing to file"
            if self.entry["upstream"] == "fixed" and self.entry["overlays"]:
                return f"{settled} (megacpp-overlays triage says when)"
            return settled
        missing = next(self._missing(), None)
        return f"needs {missing}" if missing else 'a person files it, see "File a pack" in CONTRIBUTING.md'

    def _settled(self) -> str | None:
        """Return the reason why the pack is not to be filed, now or ever; None where it is to be filed."""
        entry = self.entry
        if entry["class"] == "regression guard":
            return "it is a regression guard: nothing to file"
        if entry["upstream"] == "fixed":
            return "fixed upstream: it is not filed, and becomes a regression guard"
        if entry["upstream"] == "declined":
            return "declined upstream: it is not filed"
        if entry["class"] == "held":
            return "it is held: not filed until its class is another one"
        if entry["priority"] == "none":
            return "its priority is none: it is not filed"
        return f"its state is {entry['state']}: it was sent" if entry["state"] in _SENT else None

    def _missing(self) -> Iterator[str]:
        """Yield the missing prerequisites of filing the pack, in the order of work."""
        state, number = self.entry["state"], self.pack.number
        if self.entry["repository"] is None:
            yield f"a {pack_file.NAME}, with its repository, upstream and priority"
        if not self.has_reproducer:
            yield "a reproduce.py"
        if state in {"draft", "reproduced"}:
            word = "BUG_REPRODUCED" if state == "draft" or self.entry["class"] == "bug report" else "FIX_VALIDATED"
            yield f"a kept receipt with {word} (megacpp-overlays repro {number} --keep packs)"
        if state != READY:
            if unseen := [thread for thread in self.threads if thread.checked is None]:
                yield f"a look at {len(unseen)} of its {len(self.threads)} threads (megacpp-overlays sweep)"
            yield f"a person who moves its lifecycle state from {state} to {READY} in its {manifest.README}"
        stale = [text for text in self.problems if text.endswith(manifest.STALE) or text == manifest.MISSING]
        yield from (f"a claim that holds: {text}" for text in self.problems if text not in stale)
        if stale:
            yield "a manifest in step (megacpp-overlays receipts --sync)"


def of_all(folder: Path, overlays: Sequence[Erratum]) -> tuple[PackStatus, ...]:
    """Return the status of every pack of a folder, by number.

    Raises:
        OverlayError: the manifest, the saved answers, or the notes of a pack cannot be read.
    """
    answers = threads.read(folder)
    problems = manifest.problems(folder, overlays)
    entries = manifest.synchronise(folder, overlays)
    return tuple(
        _status(pack, manifest.entry_of(entries, pack.number) or {}, problems, answers)
        for pack in inventory.list_packs(folder)
    )


def _status(pack: Pack, entry: Mapping[str, Any], problems: Sequence[str], answers: Mapping[Key, Answer]) -> PackStatus:
    prefix = f"{pack.number:02}: "
    return PackStatus(
        pack=pack,
        entry=entry,
        problems=tuple(text.removeprefix(prefix) for text in problems if text.startswith(prefix)),
        threads=tuple(_thread(each, answers) for each in entry["threads"]),
    )


def _thread(data: Mapping[str, Any], answers: Mapping[Key, Answer]) -> PackThread:
    answer = answers.get((data["repository"], data["number"]))
    return PackThread(
        name=f"{data['repository']}#{data['number']}",
        state=(answer.state if answer else None) or "unknown",
        checked=data["checked"],
    )
