"""The outcome of an upgrade for each carried fix: keep, conflict or retire.

    verdict on `to`              evidence on `to`                               outcome
    BROKEN, all shapes seamed    the seams install; a case shows the bug        keep
                                 without the overlay and the fix with it;
                                 of a gate, that it says so and a case shows it
    FIXED                        a case shows that the bug is not present       retire
    ABSENT                       it was absent on `from`, or `to` does not      absent: nothing to carry, nothing
                                 pin its distribution                           to retire
    ABSENT                       it was FIXED on `from`                         retire
    anything else                                                               conflict

A verdict alone is never enough. The evidence is a case that was run on `to`, or the receipt of such a run elsewhere for
a case that this host cannot run. Each part with the verdict of the overlay needs evidence, because a case may concern only
some parts. A target that was broken and is gone is a conflict, regardless of the other parts: moved code keeps its defect,
and no reproducer finds it in the new place. It is no conflict where a part that was absent is present now and a case proves
its verdict, because that part is the new place.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from megacpp_overlays.model import Decision, Verdict
from megacpp_overlays.repro.judge import Sentinel
from megacpp_overlays.upkeep.evidence import PartDecision, ProbeReport, uncovered
from megacpp_overlays.upkeep.triage.facts import CaseEvidence, Facts, gone, proof, shown, verdicts

_IN_PLACE = frozenset({Decision.ACTIVE, Decision.GATED})
_OFFERED = frozenset({Decision.ACTIVE, Decision.DISABLED})


class UpgradeOutcome(enum.Enum):
    """The outcome of an upgrade for a fix."""

    KEEP = "keep"
    WITNESS = "witness"
    """In previews only: a reproducer has to decide."""
    CONFLICT = "conflict"
    RETIRE = "retire"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """The outcome, and why."""

    outcome: UpgradeOutcome
    reason: str
    to_do: str
    """The next step; empty where there is nothing to do."""


def judge(facts: Facts) -> Ruling:
    """Return the outcome for one overlay; see the module docstring."""
    cases = shown(facts)
    if problem := _problem(facts, cases) or _partly_gone(facts, cases):
        return problem
    match facts.after.verdict:
        case Verdict.ABSENT:
            return _judge_absent(facts)
        case Verdict.FIXED:
            return _judge_fixed(facts, cases)
        case _:
            return _judge_broken(facts, cases)


def _problem(facts: Facts, cases: Sequence[CaseEvidence]) -> Ruling | None:
    """Return the conflict that holds regardless of the overlay's verdict, or None."""
    after = facts.after
    if unknown := [part for part in after.parts if part.verdict is Verdict.UNRECOGNISED]:
        seen = "; ".join(f"{part.module}: {part.evidence}" for part in unknown)
        behaviour = "".join(
            f"; case {each.case}: {each.reasons}" for each in cases if Sentinel.FAILED in each.sentinels
        )
        return _conflict(f"shape unknown: {seen}{behaviour}", "read the new code, and teach its probe the shape")
    if bare := [part for part in after.parts if part.verdict is Verdict.BROKEN and not part.has_seams]:
        why = "; ".join(f"{part.shape} of {part.module}: {part.left_alone or part.evidence}" for part in bare)
        return _conflict(f"no seam for shape {why}", "extend the overlay to that shape, or have upstream repair it")
    if failed := [each for each in cases if Sentinel.FAILED in each.sentinels]:
        why = "; ".join(f"{each.case}: {each.reasons}" for each in failed)
        return _conflict(
            f"its reproducer fails: {why}",
            f"read `megacpp-overlays repro {facts.pack} --verbose` in that environment; repair overlay, probe or case",
        )
    decided = facts.decided if isinstance(facts.decided, tuple) else ()
    if refused := [each for each in decided if each.decision is Decision.CONFLICT]:
        why = "; ".join(f"{each.target}: {each.reason}" for each in refused)
        return _conflict(f"the loader refuses it: {why}", "repair the overlay, or the dependencies of its target")
    return None


def _judge_absent(facts: Facts) -> Ruling:
    before, after = facts.before, facts.after
    if before.verdict is Verdict.ABSENT:
        return Ruling(outcome=UpgradeOutcome.ABSENT, reason=f"on both: {after.evidence}", to_do="")
    if all(version is None for version in after.versions.values()):
        names = ", ".join(after.versions)
        return Ruling(outcome=UpgradeOutcome.ABSENT, reason=f"{names} is not in this environment any more", to_do="")
    if before.verdict is Verdict.FIXED:
        reason = f"upstream had repaired it, and its target is gone: {after.evidence}"
        return _retire(before, facts.locks[0], reason)
    return _gone(f"its target was {before.verdict.value} and is gone: {after.evidence}")


def _partly_gone(facts: Facts, cases: Sequence[CaseEvidence]) -> Ruling | None:
    """Return the conflict about broken parts that are gone while other parts are present, or None."""
    before = verdicts(facts.before)
    moved = any(
        before.get(part.target, Verdict.ABSENT) is Verdict.ABSENT
        and not uncovered([part], proof(part.verdict, cases, gate=part.gate))
        for part in facts.after.parts
        if part.verdict is not Verdict.ABSENT
    )
    lost = gone(facts.before, facts.after)
    if facts.after.verdict is Verdict.ABSENT or moved or not lost:
        return None
    return _gone(
        "; ".join(
            f"its target {each.target} was {before[each.target].value} and is gone: {each.evidence}" for each in lost
        )
    )


def _gone(reason: str) -> Ruling:
    return _conflict(
        reason,
        "find out whether upstream moved the code, and declare a part for the new place, or deleted it, and retire",
    )


def _judge_fixed(facts: Facts, cases: Sequence[CaseEvidence]) -> Ruling:
    if problem := _not_shown(facts, cases):
        return problem
    since = {Verdict.FIXED: ", as before the upgrade", Verdict.ABSENT: "; its target is new and right"}
    reason = f"upstream passes the reproducer without the overlay{since.get(facts.before.verdict, '')}"
    return _retire(facts.after, facts.locks[1], reason)


def _judge_broken(facts: Facts, cases: Sequence[CaseEvidence]) -> Ruling:
    after = facts.after
    if after.due:
        return _conflict("its probe says BROKEN, and its retirement check says that it is due", "repair the check")
    if isinstance(facts.decided, str):
        here = [each for each in cases if each.receipt is None]
        if uncovered(after.telling, proof(Verdict.BROKEN, here, gate=after.is_gate)):
            return _conflict(f"whether it installs is not known: {facts.decided}", "repair the environment")
    elif inactive := _inactive(after, facts.decided):
        return _conflict(f"it does not install: {inactive}", "repair the overlay for the new code")
    if problem := _not_shown(facts, cases):
        return problem
    since = "broken from here on" if facts.before.verdict in {Verdict.ABSENT, Verdict.FIXED} else "still broken"
    shows = (
        "the gate says so, and the reproducer shows it"
        if after.is_gate
        else "the seams install, and the reproducer shows bug and fix"
    )
    reason = f"{since}; {shows}"
    return Ruling(outcome=UpgradeOutcome.KEEP, reason=reason, to_do="")


def _inactive(after: ProbeReport, decided: Sequence[PartDecision]) -> str:
    """Return the broken targets without seams after their import, with the reasons, or an empty text."""
    found = {each.target: each for each in decided}
    wanting = []
    for part in after.parts:
        each = found.get(part.target)
        if part.verdict is Verdict.BROKEN and (
            each is None or each.decision not in (_OFFERED if part.opt_in else _IN_PLACE)
        ):
            wanting.append(
                f"{part.target} {each.decision.value}: {each.reason}" if each else f"{part.target} undecided"
            )
    return "; ".join(wanting)


def _not_shown(facts: Facts, cases: Sequence[CaseEvidence]) -> Ruling | None:
    """Return a conflict where a case contradicts the probes or some part has no proof, or None."""
    after = facts.after
    disagreeing = []
    for each in cases:
        probed = after.within(each).verdict
        contrary = Sentinel.BUG_NOT_PRESENT if probed is Verdict.BROKEN else Sentinel.BUG_REPRODUCED
        if contrary in each.sentinels:
            disagreeing.append(f"the probe says {probed.value}, {each}")
    if disagreeing:
        return _conflict(f"probe and behaviour disagree: {'; '.join(disagreeing)}", "repair the probe")
    missing = uncovered(after.telling, proof(after.verdict, cases, gate=after.is_gate))
    return _unproven(facts, missing, cases) if missing else None


def _unproven(facts: Facts, modules: Sequence[str], cases: Sequence[CaseEvidence]) -> Ruling:
    """Return the conflict that no case proves the verdict on some parts."""
    about = [each for each in cases if any(part.module in modules for part in facts.after.within(each).parts)]
    said = "; ".join(f"{each.case}: {each.reasons}" for each in about)
    why = facts.ran if isinstance(facts.ran, str) else said
    return _conflict(
        f"the probe says {facts.after.verdict.value} of {', '.join(modules)} and nothing else shows it: "
        f"{why or 'its pack has no case for it'}",
        f"run it where it can run with these versions, `megacpp-overlays repro {facts.pack} --keep FOLDER`, and take "
        "the receipt in here, `megacpp-overlays receipts --adopt FOLDER`",
    )


def _conflict(reason: str, to_do: str) -> Ruling:
    return Ruling(outcome=UpgradeOutcome.CONFLICT, reason=reason, to_do=to_do)


def _retire(probed: ProbeReport, lock: str, reason: str) -> Ruling:
    if not probed.due:
        reason = f"{reason}; its retirement check does not say so yet"
    to_do = f"`megacpp-overlays retire {probed.overlay} --lock {lock}`"
    return Ruling(outcome=UpgradeOutcome.RETIRE, reason=reason, to_do=to_do)
