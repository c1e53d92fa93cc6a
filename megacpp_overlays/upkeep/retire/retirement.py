"""The items of the checklist of a retirement, checked in the environment of a lock.

Neither a version number nor a probe alone is sufficient. The probe must say FIXED, the overlay's own condition must
hold, the reproducer must show that upstream is right, and no other lane may lose a repair that it needs unless the user
names the lane.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_overlays.model import Verdict
from megacpp_overlays.repro import inventory, manifest, receipts
from megacpp_overlays.repro.inventory import Pack
from megacpp_overlays.repro.judge import Sentinel, meaning
from megacpp_overlays.upkeep import evidence, other_python
from megacpp_overlays.upkeep.environments import Environment
from megacpp_overlays.upkeep.evidence import ProbeReport
from megacpp_overlays.upkeep.retire.lanes import Lane, Need

_SAID = re.compile(r"^([A-Z]+(?:_[A-Z]+)*: .*) \(case (\S+)\)$", re.MULTILINE)
_GONE = Sentinel.BUG_NOT_PRESENT
_MARGIN = 120.0
"""Seconds allowed in addition to the processes of the cases."""


class ItemState(enum.Enum):
    """The state of an item of the checklist."""

    DONE = "done"
    REFUSED = "refused"
    NOT_REACHED = "not reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecklistItem:
    """One line of the checklist."""

    name: str
    state: ItemState
    said: str
    way_out: str | None = None
    """The command-line option that settles the item, where there is one."""


class Checklist:
    """The items so far. After one was refused, slow steps are skipped."""

    def __init__(self, show: Callable[[ChecklistItem], None]) -> None:
        self.items: list[ChecklistItem] = []
        self._show = show

    @property
    def holds(self) -> bool:
        """Whether every item is done."""
        return all(item.state is ItemState.DONE for item in self.items)

    def add(self, name: str, said: str, *, holds: bool, way_out: str | None = None) -> None:
        """Add an item with its result."""
        self._add(
            ChecklistItem(name=name, state=ItemState.DONE if holds else ItemState.REFUSED, said=said, way_out=way_out)
        )

    def skip(self, name: str, why: str) -> None:
        """Add an item that was not reached."""
        self._add(ChecklistItem(name=name, state=ItemState.NOT_REACHED, said=why))

    def _add(self, item: ChecklistItem) -> None:
        self.items.append(item)
        self._show(item)


def probe(checklist: Checklist, environment: Environment, overlay_id: str, retire_when: str) -> ProbeReport:
    """Add the items on whether the probe says FIXED and the retirement condition holds in an environment."""
    probed = evidence.probe(environment)[overlay_id]
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in probed.versions.items())
    seen = f"{probed.verdict.value} on {versions}: {probed.evidence}"
    if probed.verdict is Verdict.ABSENT:
        seen += (
            "; that a target is not there does not say that it will not come back: if it is gone for good, let "
            "the probe say FIXED there first"
        )
    checklist.add("probe", seen, holds=probed.verdict is Verdict.FIXED)
    holds = "holds" if probed.due else "does not hold"
    checklist.add("condition", f"it {holds} there: {retire_when}", holds=probed.due)
    return probed


def reproduce(
    checklist: Checklist,
    environment: Environment,
    pack: Pack,
    probed: ProbeReport,
    folder: Path,
    tell: Callable[[str], object] = lambda line: None,
) -> bool:
    """Run the cases of the overlay, and keep the receipt in a folder; return whether the receipt shows that the bug is gone.

    Every part that is FIXED needs a case that shows it. Where this host cannot run the case, a kept receipt of the same
    versions counts.

    Args:
        checklist: receives the item.
        environment: the environment.
        pack: the pack of the cases.
        probed: the report of the probe.
        folder: an empty folder, for the receipt.
        tell: receives a line before the cases run, which takes minutes.
    """
    cases = {case.name: case for case in inventory.load_cases(pack.reproducer) if case.overlay == probed.overlay}
    if not cases:
        checklist.add("reproducer", f"{pack.name} has no case of {probed.overlay}", holds=False)
        return False
    many = "case" if len(cases) == 1 else "cases"
    tell(
        f"running {len(cases)} {many} of {pack.name} in {environment.python}, at most {2 * evidence.TIMEOUT / 60:g} min each"
    )
    command = ["-m", "megacpp_overlays", "repro", str(pack.number), "--keep", str(folder)]
    command += [word for name in cases for word in ("--case", name)]
    text, ended = other_python.output(environment.python, command, 2 * len(cases) * evidence.TIMEOUT + _MARGIN)
    said = "; ".join(f"{word} (case {case})" for word, case in _SAID.findall(text))
    shown = _shown(folder, pack, probed.overlay)
    if shown is None:
        checklist.add("reproducer", said or f"it {ended or 'said nothing'}", holds=False)
        return False
    fixed = [part for part in probed.parts if part.verdict is Verdict.FIXED]
    about, notes = [cases[name] for name in shown], [said]
    for kept in evidence.receipts_for(probed, pack, environment.lock):
        if all(words == {_GONE} for words in kept.said.values()):
            missing = evidence.uncovered(fixed, about)
            about += [cases[name] for name in kept.said]
            if shows := set(missing) - set(evidence.uncovered(fixed, about)):
                notes.append(f"{kept.log} shows {_GONE.value} for {', '.join(sorted(shows))}")
    missing = evidence.uncovered(fixed, about)
    if missing:
        why = f"no case that runs on this host, and no kept receipt of these versions, shows {_GONE.value} for "
        checklist.add("reproducer", f"{why}{', '.join(missing)}: {said}", holds=False)
    else:
        checklist.add("reproducer", "; ".join(notes), holds=True)
    return bool(shown)


def _shown(folder: Path, pack: Pack, overlay_id: str) -> frozenset[str] | None:
    """Return the cases that show in a run's receipt that the bug is gone; None where a case failed or shows another result."""
    entry = manifest.entry_of(manifest.read(folder), pack.number)
    if entry is None or receipts.problems(folder):
        return None
    [receipt] = entry["receipts"]
    claims = [claim for claim in receipt["claims"] if claim["overlay"] == overlay_id]
    if receipt["exit_code"] == 1 or any(meaning(claim["sentinel"]) is not _GONE for claim in claims):
        return None
    return frozenset(claim["case"] for claim in claims)


def other_lanes(checklist: Checklist, lanes: Sequence[Lane], leave: Sequence[str]) -> list[Lane]:
    """Add an item for each other lane on whether it needs the overlay; return the lanes left unpatched on purpose."""
    left = []
    for lane in lanes:
        said = f"{lane.pinned}: {lane.need.value}; {lane.why}"
        if lane.need is Need.NO:
            checklist.add(f"lane {lane.name}", said, holds=True)
        elif lane.name in leave:
            left.append(lane)
            checklist.add(f"lane {lane.name}", f"will run unpatched: {said}", holds=True)
        else:
            checklist.add(f"lane {lane.name}", said, holds=False, way_out=f"--leave {lane.name}")
    if not lanes:
        checklist.add("other lanes", "none has its target", holds=True)
    return left
