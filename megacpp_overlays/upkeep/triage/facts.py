"""Facts of an overlay for an upgrade: findings, decisions and results of its cases, and the verdicts that the cases prove."""

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
"""The sentinels that a case must report to prove a verdict; other verdicts cannot be proved."""
BROKEN = frozenset({Verdict.BROKEN, Verdict.UNRECOGNISED})
"""Verdicts on code that is present and not known to be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts of one overlay."""

    pack: int
    """Number of its pack."""
    locks: tuple[str, str]
    """Paths of the locks `from` and `to`, for the text of the next steps."""
    before: ProbeReport
    after: ProbeReport
    decided: tuple[PartDecision, ...] | str
    """The loader's decisions on `to`, or the reason why they are not known. They matter where the target is BROKEN."""
    ran: tuple[CaseResult, ...] | str
    """The results of its cases on `to`, or the reason why none ran."""
    kept: tuple[KeptReceipt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseEvidence:
    """The evidence of one case on `to`."""

    case: str
    said: tuple[Conclusion, ...]
    receipt: str | None
    """The log of the receipt; None where the case ran here."""
    targets: tuple[str, ...]
    """Modules of the parts that the case concerns; empty means every part."""

    @property
    def sentinels(self) -> frozenset[Sentinel]:
        """The sentinels of the conclusions, without the reasons."""
        return frozenset(each.sentinel for each in self.said)

    @property
    def reasons(self) -> str:
        """The reasons, as one line."""
        return "; ".join(each.reason for each in self.said)

    def __str__(self) -> str:
        return f"{self.case} says {' and '.join(each.sentinel.value for each in self.said)}"


def shown(facts: Facts) -> tuple[CaseEvidence, ...]:
    """Return the evidence of each case: its result here, or the newest receipt where it is BLOCKED here."""
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
    """Return the cases that prove a verdict on the parts that they concern; the cases of a gate need to show no fix."""
    needed = _PROOF.get(verdict, frozenset()) - ({Sentinel.FIX_VALIDATED} if gate else set())
    return tuple(each for each in cases if needed and each.sentinels >= needed)


def verdicts(report: ProbeReport) -> Mapping[str, Verdict]:
    """Return the verdict on each part by its target."""
    return {part.target: part.verdict for part in report.parts}


def gone(before: ProbeReport, after: ProbeReport) -> list[ProbedPart]:
    """Return the parts that were broken or not recognised, and are now absent although their distribution is installed."""
    was = verdicts(before)
    lost = (part for part in after.parts if part.verdict is Verdict.ABSENT and part.version is not None)
    return [part for part in lost if was.get(part.target) in BROKEN]
