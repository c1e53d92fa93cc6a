"""Facts of an overlay for an upgrade: what was learned of it, and what its cases show of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megacpp_overlays.model import Verdict
from megacpp_overlays.repro.judge import Conclusion, Sentinel
from megacpp_overlays.upkeep.evidence import CaseResult, KeptReceipt, PartDecision, ProbedPart, ProbeReport

_PROOF = {
    Verdict.BROKEN: frozenset({Sentinel.BUG_REPRODUCED, Sentinel.FIX_VALIDATED}),
    Verdict.FIXED: frozenset({Sentinel.BUG_NOT_PRESENT}),
}
"""What a case must say to show a verdict; it can show no other."""
BROKEN = frozenset({Verdict.BROKEN, Verdict.UNRECOGNISED})
"""Verdicts on code that is there, and that nothing shows to be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was learned of one overlay."""

    pack: int
    """Number of its pack."""
    locks: tuple[str, str]
    """Paths of the locks `from` and `to`, for whoever reads what to do next."""
    before: ProbeReport
    after: ProbeReport
    decided: tuple[PartDecision, ...] | str
    """What the loader decided on `to`, or why that is not known. It matters where the target is BROKEN."""
    ran: tuple[CaseResult, ...] | str
    """What its cases said on `to`, or why none was run."""
    kept: tuple[KeptReceipt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseEvidence:
    """What is known of one case on `to`."""

    case: str
    said: tuple[Conclusion, ...]
    receipt: str | None
    """The log that says so; None where it was run here."""
    targets: tuple[str, ...]
    """Modules of the parts that it is about; empty means every part."""

    @property
    def sentinels(self) -> frozenset[Sentinel]:
        """What was said, without the reasons."""
        return frozenset(each.sentinel for each in self.said)

    @property
    def reasons(self) -> str:
        """The reasons, as one line."""
        return "; ".join(each.reason for each in self.said)

    def __str__(self) -> str:
        return f"{self.case} says {' and '.join(each.sentinel.value for each in self.said)}"


def shown(facts: Facts) -> tuple[CaseEvidence, ...]:
    """Return what is known of each case: what it said here, or what the newest receipt says where it is BLOCKED."""
    found = []
    log: str | None
    for result in facts.ran if not isinstance(facts.ran, str) else ():
        kept = next((each for each in facts.kept if result.name in each.said), None)
        if kept is not None and Sentinel.BLOCKED in result.sentinels:
            why = f"not run here: {result.said[0].reason}"
            words = sorted(kept.said[result.name], key=list(Sentinel).index)
            said, log = tuple(Conclusion(word, why) for word in words), kept.log
        else:
            said, log = result.said, None
        found.append(CaseEvidence(case=result.name, said=said, receipt=log, targets=result.targets))
    return tuple(found)


def proof(verdict: Verdict, cases: Iterable[CaseEvidence], *, gate: bool = False) -> tuple[CaseEvidence, ...]:
    """Return the cases that show that a verdict is true of the parts that they are about; a gate shows no fix."""
    needed = _PROOF.get(verdict, frozenset()) - ({Sentinel.FIX_VALIDATED} if gate else set())
    return tuple(each for each in cases if needed and each.sentinels >= needed)


def verdicts(report: ProbeReport) -> Mapping[str, Verdict]:
    """Return the verdict on each part by its target."""
    return {part.target: part.verdict for part in report.parts}


def gone(before: ProbeReport, after: ProbeReport) -> list[ProbedPart]:
    """Return the parts that were broken, or not recognised, and are gone from a distribution that is still there."""
    was = verdicts(before)
    lost = (part for part in after.parts if part.verdict is Verdict.ABSENT and part.version is not None)
    return [part for part in lost if was.get(part.target) in BROKEN]
