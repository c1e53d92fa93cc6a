"""Status of every pack: its entry, errors in its claims, and requirements that are missing before it can be sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """An upstream thread of a pack, as last seen."""

    repository: str
    number: int
    checked: str | None
    """Day, as 2026-11-21; None is never."""
    answer: Answer | None
    """What a sweep saved about it."""

    @property
    def name(self) -> str:
        """How a text names it anywhere, `owner/name#12`."""
        return f"{self.repository}#{self.number}"

    @property
    def state(self) -> str:
        """One word: the answer's, or `unknown`."""
        return (self.answer.state if self.answer else None) or "unknown"

    @property
    def is_open(self) -> bool:
        """Whether one can comment on it and be read."""
        return self.state in {threads.OPEN, threads.DRAFT}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackStatus:
    """One pack."""

    pack: Pack
    entry: Mapping[str, Any]
    """As the manifest should have it."""
    wrong: tuple[str, ...]
    """What `receipts --check` says of its claims."""
    threads: tuple[PackThread, ...]

    @property
    def number(self) -> int:
        """Number of the pack."""
        return self.pack.number

    @property
    def has_reproducer(self) -> bool:
        """Whether there is a reproduce.py."""
        return self.pack.reproducer.is_file()

    @property
    def kept(self) -> tuple[int, int]:
        """How many receipts there are, and how many are of the reproducer as it is now."""
        digest = inventory.digest(self.pack.reproducer)
        every = self.entry["receipts"]
        return len(every), sum(receipt["reproducer"] == digest for receipt in every)

    @property
    def settled(self) -> str | None:
        """Why there is nothing to send, now or ever; None where there is."""
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
        if entry["state"] in _SENT:
            return f"its state is {entry['state']}: it was sent"
        return None

    @property
    def lacks(self) -> tuple[str, ...]:
        """What is missing before it is ready, the next step first; empty for what is ready and for what is settled."""
        return () if self.settled else (*self._unwritten(), *self._unproven(), *self.doubts)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What `wrong` asks for, in few words."""
        stale = [text for text in self.wrong if text.endswith(manifest.STALE) or text == manifest.MISSING]
        claims = tuple(f"a claim that holds: {text}" for text in self.wrong if text not in stale)
        return (*claims, "a manifest in step (megacpp-overlays receipts --sync)") if stale else claims

    @property
    def is_ready(self) -> bool:
        """Whether it can be in a wave."""
        return self.entry["state"] == READY and not self.settled and not self.lacks

    @property
    def next_step(self) -> str:
        """What to do next, in one line."""
        if not self.settled:
            return f"needs {self.lacks[0]}" if self.lacks else f"megacpp-overlays pack check {self.number}"
        if self.entry["class"] == "regression guard" and not self.has_reproducer:
            return "needs a reproduce.py that shows BUG_NOT_PRESENT; there is nothing to file"
        if self.entry["upstream"] == "fixed" and self.entry["overlays"]:
            return f"{self.settled} (megacpp-overlays triage says when)"
        return self.settled

    def _unwritten(self) -> list[str]:
        missing = []
        if self.entry["repository"] is None:
            missing.append(f"a {pack_file.NAME}, with its repository, upstream and priority")
        if not self.has_reproducer:
            missing.append("a reproduce.py")
        return missing

    def _unproven(self) -> list[str]:
        state, number = self.entry["state"], self.number
        if state == READY:
            return []
        found = []
        if state in {"draft", "reproduced"}:
            word = "BUG_REPRODUCED" if state == "draft" or self.entry["class"] == "bug report" else "FIX_VALIDATED"
            found.append(f"a kept receipt with {word} (megacpp-overlays repro {number} --keep packs)")
        if unseen := [thread for thread in self.threads if thread.checked is None]:
            found.append(f"a look at {len(unseen)} of its {len(self.threads)} threads (megacpp-overlays sweep)")
        return [*found, f"a person who moves its lifecycle state from {state} to {READY} in its {manifest.README}"]


def of_all(folder: Path, overlays: Sequence[Erratum]) -> tuple[PackStatus, ...]:
    """Return every pack of a folder, by number.

    Raises:
        OverlayError: the manifest, the saved answers, or the notes of a pack cannot be read.
    """
    answers = threads.read(folder)
    problems = manifest.problems(folder, overlays)
    entries = manifest.synchronise(folder, overlays)
    return tuple(
        _standing(pack, manifest.entry_of(entries, pack.number) or {}, problems, answers)
        for pack in inventory.list_packs(folder)
    )


def of_one(folder: Path, number: int, overlays: Sequence[Erratum]) -> PackStatus:
    """Return one pack of a folder.

    Raises:
        OverlayError: there is no such pack, or see `of_all`.
    """
    inventory.find(folder, number)
    return next(each for each in of_all(folder, overlays) if each.number == number)


def _standing(
    pack: Pack, entry: Mapping[str, Any], problems: Sequence[str], answers: Mapping[Key, Answer]
) -> PackStatus:
    prefix = f"{pack.number:02}: "
    return PackStatus(
        pack=pack,
        entry=entry,
        wrong=tuple(text.removeprefix(prefix) for text in problems if text.startswith(prefix)),
        threads=tuple(
            PackThread(
                repository=each["repository"],
                number=each["number"],
                checked=each["checked"],
                answer=answers.get((each["repository"], each["number"])),
            )
            for each in entry["threads"]
        ),
    )
