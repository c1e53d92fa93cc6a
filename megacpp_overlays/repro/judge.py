"""Judgement of a case by its two runs and its probe, as pure functions.

A sentinel is earned by a measurement that the probe agrees with:

    probe          the run without the overlay        earns
    BROKEN         broken                             BUG_REPRODUCED, and FIX_VALIDATED if the run with every overlay
                                                      is not broken and the overlay is active in it
    FIXED          not broken                         BUG_NOT_PRESENT, if it is not broken with every overlay either
    ABSENT         the target is absent               BUG_NOT_PRESENT
    UNRECOGNISED   anything                           nothing: FAILED

Every other combination is FAILED. A case that cannot run here is BLOCKED, whatever the probe says.

A case may print a word of its own for FIX_VALIDATED, such as MEMORY_SAVE_VERIFIED; it is earned in the same way.

A gate repairs nothing, so its case runs once: BUG_REPRODUCED where the probe says BROKEN, the combination does not work and
the gate said so at start-up; BUG_NOT_PRESENT as above.

A claim has neither overlay nor probe: CLAIM_HOLDS where its one run confirms it.

A retired overlay has no probe any more. Its case runs once, as a regression guard that measures upstream alone:
BUG_NOT_PRESENT is earned where upstream is not broken or has no such feature, and FAILED says that the bug is back.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from megacpp_overlays.loader.retired import RetiredOverlay
from megacpp_overlays.model import Decision, Verdict

if TYPE_CHECKING:
    from megacpp_overlays.repro.neighbour import NeighbourResult


class Sentinel(enum.Enum):
    """The words that a reproducer prints."""

    BUG_REPRODUCED = "BUG_REPRODUCED"
    FIX_VALIDATED = "FIX_VALIDATED"
    BUG_NOT_PRESENT = "BUG_NOT_PRESENT"
    CLAIM_HOLDS = "CLAIM_HOLDS"
    BLOCKED = "BLOCKED"
    FAILED = "FAILED"


EARNED = frozenset(Sentinel) - {Sentinel.BLOCKED, Sentinel.FAILED}


def meaning(word: str) -> Sentinel:
    """Return the sentinel of a printed word: a case's own word means FIX_VALIDATED."""
    return Sentinel.__members__.get(word, Sentinel.FIX_VALIDATED)


class RunKind(enum.Enum):
    """How a run of a case ended."""

    BROKEN = "broken"
    SOUND = "sound"
    ABSENT = "absent"
    BLOCKED = "blocked"
    FAILED = "failed"
    """It measured nothing: an error, a crash, or a measurement of the wrong code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the overlay in one run, with the probe's finding and the loader's decision."""

    module: str
    verdict: Verdict
    shape: str | None
    evidence: str
    decision: Decision | None
    """None where the run did not get that far."""
    reason: str
    looks_repaired: bool = False
    sources: Mapping[str, str | None] | None = None
    """Hashes of the sources that the probe read and that were loaded; None without `--witness`, or where the run did not get that far."""
    difference: str | None = None
    """Description of the loaded source where it is not the one that the probe read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a case in a process of its own."""

    kind: RunKind
    seen: str
    parts: tuple[Part, ...]
    beside: Mapping[str, NeighbourResult] = field(default_factory=dict)
    """Results of the case's neighbours, by name."""


class Conclusion(NamedTuple):
    """A sentinel and the reason for it."""

    sentinel: Sentinel
    reason: str
    shows_nothing: bool = False
    """Whether the probe says BROKEN and this case measured no defect. Another case of the same overlay may show it."""


class HasVerdict(Protocol):
    """Finding of a probe about one part of an overlay."""

    @property
    def verdict(self) -> Verdict:
        """The verdict on this part."""


def verdict_of(parts: Iterable[HasVerdict]) -> Verdict:
    """Return the verdict over all parts of an overlay: one broken part is enough to be broken."""
    seen = {part.verdict for part in parts}
    for verdict in (Verdict.BROKEN, Verdict.UNRECOGNISED, Verdict.FIXED):
        if verdict in seen:
            return verdict
    return Verdict.ABSENT


def judge(without: Run, with_all: Run | None) -> tuple[Conclusion, ...]:
    """Return the conclusions from a run without the overlay and a run with every overlay.

    Args:
        without: the run without the overlay of the case.
        with_all: the run with every overlay; None where the first run left nothing to compare.
    """
    if without.kind is RunKind.BLOCKED:
        return (Conclusion(Sentinel.BLOCKED, without.seen),)
    if without.kind is RunKind.FAILED:
        return (_failed(f"without the overlay: {without.seen}"),)
    verdict = verdict_of(without.parts)
    if any(part.decision is Decision.ACTIVE for part in without.parts):
        return (_failed("the overlay was active in the run without it"),)
    match verdict, without.kind:
        case Verdict.ABSENT, RunKind.ABSENT:
            return (Conclusion(Sentinel.BUG_NOT_PRESENT, f"the target is absent: {without.seen}"),)
        case Verdict.FIXED, RunKind.SOUND:
            problem = _harm(with_all)
            return (_failed(problem) if problem else Conclusion(Sentinel.BUG_NOT_PRESENT, without.seen),)
        case Verdict.BROKEN, RunKind.BROKEN:
            problem = _no_fix(with_all)
            fix = _failed(problem) if problem else Conclusion(Sentinel.FIX_VALIDATED, with_all.seen if with_all else "")
            return (Conclusion(Sentinel.BUG_REPRODUCED, without.seen), fix)
        case _:
            return (_disagreement(verdict, without),)


def gate(run: Run) -> tuple[Conclusion, ...]:
    """Return the conclusions from one run of a gate's case."""
    if run.kind is RunKind.BLOCKED:
        return (Conclusion(Sentinel.BLOCKED, run.seen),)
    if run.kind is RunKind.FAILED:
        return (_failed(run.seen),)
    verdict = verdict_of(run.parts)
    match verdict, run.kind:
        case Verdict.BROKEN, RunKind.BROKEN if all(part.decision is Decision.GATED for part in run.parts):
            return (Conclusion(Sentinel.BUG_REPRODUCED, run.seen),)
        case Verdict.BROKEN, RunKind.BROKEN:
            return (_failed("it does not work, and the gate does not say so: " + decisions(run.parts)),)
        case Verdict.FIXED, RunKind.SOUND:
            return (Conclusion(Sentinel.BUG_NOT_PRESENT, run.seen),)
        case Verdict.ABSENT, RunKind.ABSENT:
            return (Conclusion(Sentinel.BUG_NOT_PRESENT, f"the combination is absent: {run.seen}"),)
        case _:
            return (_disagreement(verdict, run),)


def claim(run: Run) -> tuple[Conclusion, ...]:
    """Return the conclusions from one run of a claim about upstream."""
    match run.kind:
        case RunKind.BLOCKED:
            return (Conclusion(Sentinel.BLOCKED, run.seen),)
        case RunKind.SOUND:
            return (Conclusion(Sentinel.CLAIM_HOLDS, run.seen),)
        case RunKind.ABSENT:
            return (Conclusion(Sentinel.BUG_NOT_PRESENT, f"the subject of the claim is absent: {run.seen}"),)
        case RunKind.BROKEN:
            return (_failed(f"the claim does not hold: {run.seen}"),)
        case RunKind.FAILED:
            return (_failed(run.seen),)


def guard(run: Run, gone: RetiredOverlay) -> tuple[Conclusion, ...]:
    """Return the conclusions from the case of a retired overlay.

    Args:
        run: the one run, with the overlays that there still are.
        gone: the overlay of the case.
    """
    match run.kind:
        case RunKind.BLOCKED:
            return (Conclusion(Sentinel.BLOCKED, run.seen),)
        case RunKind.FAILED:
            return (_failed(run.seen),)
        case RunKind.BROKEN:
            return (_failed(f"the bug is back, or this release never had the repair: {gone}; {run.seen}"),)
        case RunKind.ABSENT:
            return (Conclusion(Sentinel.BUG_NOT_PRESENT, f"the target is absent: {run.seen}"),)
        case RunKind.SOUND:
            return (Conclusion(Sentinel.BUG_NOT_PRESENT, run.seen),)


def _no_fix(run: Run | None) -> str | None:
    """Return why a run with every overlay validates no fix, or None when it does."""
    if run is None or run.kind is not RunKind.SOUND:
        return _unusable(run)
    broken = [part for part in run.parts if part.verdict is Verdict.BROKEN]
    # A case may leave one of several targets alone; that part then waits, and nothing is claimed for it.
    if not any(part.decision is Decision.ACTIVE for part in broken):
        return "not broken with every overlay, but the overlay is not active: " + decisions(run.parts)
    if any(part.decision not in {Decision.ACTIVE, Decision.ARMED} for part in broken) or _in_conflict(run):
        return "the overlay is only partly in: " + decisions(run.parts)
    return None


def _harm(run: Run | None) -> str | None:
    """Describe the harm of overlays to an upstream that is right; None when they leave it alone."""
    if run is None or run.kind is not RunKind.SOUND:
        return _unusable(run)
    if any(part.decision is Decision.ACTIVE for part in run.parts) or _in_conflict(run):
        return "upstream is right, and yet the overlay is not retired: " + decisions(run.parts)
    return None


def _unusable(run: Run | None) -> str:
    return "there is no run with every overlay" if run is None else f"with every overlay: {run.kind.value}: {run.seen}"


def _in_conflict(run: Run) -> bool:
    return any(part.decision is Decision.CONFLICT for part in run.parts)


def decisions(parts: Sequence[Part]) -> str:
    """Return the decisions on parts with their reasons, as one line."""
    return "; ".join(
        f"{part.module} {part.decision.value if part.decision else 'undecided'}: {part.reason}" for part in parts
    )


def _disagreement(verdict: Verdict, run: Run) -> Conclusion:
    says = {RunKind.BROKEN: "broken", RunKind.SOUND: "not broken", RunKind.ABSENT: "absent"}[run.kind]
    found = _failed(f"the probe says {verdict.value}, the behaviour is {says}: {run.seen}")
    return found._replace(shows_nothing=verdict is Verdict.BROKEN and run.kind is RunKind.SOUND)


def _failed(reason: str) -> Conclusion:
    return Conclusion(Sentinel.FAILED, reason)
