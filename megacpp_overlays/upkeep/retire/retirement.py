"""The questions of the checklist of a retirement, answered in the environment of a lock.

A version number is no answer and neither is one probe alone. The probe must say FIXED, the overlay's own condition must
hold, the reproducer must show upstream right, and no other lane may lose a repair that it needs without being named.
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
"""Seconds for everything but the processes of the cases."""


class ItemState(enum.Enum):
    """How an item of the checklist ended."""

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
    """The option that settles it, where one does."""


class Checklist:
    """The items so far. After one was refused, what would take long is not tried."""

    def __init__(self, show: Callable[[ChecklistItem], None]) -> None:
        self.items: list[ChecklistItem] = []
        self._show = show

    @property
    def holds(self) -> bool:
        """Whether nothing was refused."""
        return all(item.state is ItemState.DONE for item in self.items)

    def add(self, name: str, said: str, *, holds: bool, way_out: str | None = None) -> None:
        """Add an answer."""
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
    """Ask the probe whether the overlay is due there."""
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
    """Run the cases of the overlay, and keep the receipt in a folder; return whether it shows the bug gone.

    Every part that is FIXED needs a case about it that shows so. Where this host cannot run it, one in a kept receipt
    of the same versions counts.

    Args:
        checklist: gets the answer.
        environment: where.
        pack: its cases.
        probed: what the probe said.
        folder: an empty folder, for the receipt.
        tell: gets a line before cases run, which takes minutes.
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
    about, told = [cases[name] for name in shown], [said]
    for kept in evidence.receipts_for(probed, pack, environment.lock):
        if all(words == {_GONE} for words in kept.said.values()):
            missing = evidence.uncovered(fixed, about)
            about += [cases[name] for name in kept.said]
            if shows := set(missing) - set(evidence.uncovered(fixed, about)):
                told.append(f"{kept.log} shows {_GONE.value} for {', '.join(sorted(shows))}")
    missing = evidence.uncovered(fixed, about)
    if missing:
        why = f"no case that runs on this host, and no kept receipt of these versions, shows {_GONE.value} for "
        checklist.add("reproducer", f"{why}{', '.join(missing)}: {said}", holds=False)
    else:
        checklist.add("reproducer", "; ".join(told), holds=True)
    return bool(shown)


def _shown(folder: Path, pack: Pack, overlay_id: str) -> frozenset[str] | None:
    """Return the cases that show the bug gone in the receipt of a run; None where anything failed or says otherwise."""
    entry = manifest.entry_of(manifest.read(folder), pack.number)
    if entry is None or receipts.problems(folder):
        return None
    [receipt] = entry["receipts"]
    claims = [claim for claim in receipt["claims"] if claim["overlay"] == overlay_id]
    if receipt["exit_code"] == 1 or any(meaning(claim["sentinel"]) is not _GONE for claim in claims):
        return None
    return frozenset(claim["case"] for claim in claims)


def other_lanes(checklist: Checklist, lanes: Sequence[Lane], leave: Sequence[str]) -> list[Lane]:
    """Ask whether the other lanes can do without; return those that are left unpatched on purpose."""
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
