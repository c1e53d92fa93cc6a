"""Preview of an upgrade: the expected outcome of each overlay from probes and kept records, without running a reproducer.

    expected    verdict of the probes on `to`
    keep        BROKEN, in a shape that the overlay has seams for
    witness     a part is not recognised, and a reproducer can decide: `megacpp-overlays witness` has to run there
    conflict    a part is not recognised, and its seams cannot be placed; BROKEN without a seam; gone where it was broken
    retire      FIXED, or gone after it was FIXED
    absent      absent on both sides, or the distribution is not pinned any more

It takes seconds and proves nothing; `triage` without `--quick` runs the reproducers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megacpp_overlays.model import Erratum, Verdict
from megacpp_overlays.upkeep import evidence, ledger
from megacpp_overlays.upkeep.environments import Environment
from megacpp_overlays.upkeep.evidence import ProbedPart, ProbeReport
from megacpp_overlays.upkeep.triage.facts import BROKEN, gone, verdicts
from megacpp_overlays.upkeep.triage.outcomes import UpgradeOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlayPreview:
    """One overlay on both sides of an upgrade, with its expected outcome."""

    overlay: Erratum
    """The first of its parts."""
    before: ProbeReport
    after: ProbeReport
    expected: UpgradeOutcome
    reason: str


def preview(before: Environment, after: Environment, overlays: Sequence[Erratum]) -> tuple[OverlayPreview, ...]:
    """Preview an upgrade for overlays.

    Args:
        before: the environment before the upgrade.
        after: the environment after the upgrade.
        overlays: the declarations, in parts.

    Raises:
        UpkeepError: this package does not run in one of the environments, or knows other overlays there.
    """
    firsts = {name: parts[0] for name, parts in ledger.by_id(overlays).items()}
    here, there = (evidence.probe_all(each, firsts) for each in (before, after))
    found = []
    for name, overlay in firsts.items():
        expected, reason = expect(here[name], there[name])
        found.append(
            OverlayPreview(overlay=overlay, before=here[name], after=there[name], expected=expected, reason=reason)
        )
    return tuple(found)


def expect(before: ProbeReport, after: ProbeReport) -> tuple[UpgradeOutcome, str]:
    """Return the expected outcome of an overlay, and the reason."""
    unknown = [part for part in after.parts if part.verdict is Verdict.UNRECOGNISED]
    if unproved := [part for part in unknown if part.can_be_proved]:
        return UpgradeOutcome.WITNESS, f"not recognised: {_modules(unproved)}"
    if unknown:
        return UpgradeOutcome.CONFLICT, f"not recognised, and no seam can be placed: {_seen(unknown)}"
    if bare := [part for part in after.parts if part.verdict is Verdict.BROKEN and not part.has_seams]:
        return UpgradeOutcome.CONFLICT, f"no seam for its shape: {_seen(bare)}"
    if gone := _gone(before, after):
        return UpgradeOutcome.CONFLICT, f"it was broken and is gone: {_seen(gone)}"
    match after.verdict:
        case Verdict.FIXED:
            return UpgradeOutcome.RETIRE, f"upstream repaired it: {after.evidence}"
        case Verdict.ABSENT if before.verdict is Verdict.FIXED and any(after.versions.values()):
            return UpgradeOutcome.RETIRE, f"upstream had repaired it, and its target is gone: {after.evidence}"
        case Verdict.ABSENT:
            return UpgradeOutcome.ABSENT, after.evidence
    was_right = before.verdict in {Verdict.ABSENT, Verdict.FIXED}
    return UpgradeOutcome.KEEP, "broken from here on" if was_right else "still broken"


def _gone(before: ProbeReport, after: ProbeReport) -> list[ProbedPart]:
    """Return the broken parts that are gone; none if a new part is broken, because the code was moved to that part."""
    was = verdicts(before)
    new = (part for part in after.parts if was.get(part.target, Verdict.ABSENT) is Verdict.ABSENT)
    return [] if any(part.verdict in BROKEN for part in new) else gone(before, after)


def _modules(parts: Sequence[ProbedPart]) -> str:
    return ", ".join(part.module for part in parts)


def _seen(parts: Sequence[ProbedPart]) -> str:
    return "; ".join(f"{part.module}: {part.left_alone or part.evidence}" for part in parts)
