"""Fields of a decision: the texts that logs, audits and explanations choose from, each made in one place."""

from __future__ import annotations

from typing import NamedTuple

from megacpp_overlays.loader.decisions import TRAITS
from megacpp_overlays.model import UNDECIDED, Decision, Erratum, Record, Verdict


class Fields(NamedTuple):
    """Texts about one decision. A field that does not apply to it is empty."""

    name: str
    """Id of the overlay, with its pack."""
    installed: str
    """The distribution and its version."""
    verdict: str
    """The verdict with its shape, once a probe has run."""
    reason: str
    effect: str
    """Effect on the run."""
    seams: tuple[str, ...]
    """Names that are bound to a seam now, those in the target's module without its prefix."""
    off: str
    """The setting that switches the overlay off."""
    deleted: str
    """The condition under which the overlay is deleted."""


def titled(overlay: Erratum) -> str:
    """Return the id of an overlay or gate, with its pack."""
    return f"{overlay.id} (pack {overlay.pack:02})"


def fields(record: Record) -> Fields:
    """Return the fields of a decision."""
    overlay, traits = record.overlay, TRAITS[record.decision]
    shape = f", shape {record.shape}" if record.finding and record.finding.shape else ""
    prefix = f"{overlay.target.module}."
    return Fields(
        name=titled(overlay),
        installed=f"{overlay.target.distribution} {record.version or ''}".rstrip(),
        verdict=f"{record.verdict}{shape}" if record.finding else "",
        reason=record.reason,
        effect=_effect(record),
        seams=tuple(name.removeprefix(prefix) for name in (*record.seams, *record.rebound)),
        off=f"{overlay.variable}=off" if traits.can_be_switched_off else "",
        deleted=overlay.retire_when if traits.can_be_deleted else "",
    )


def _effect(record: Record) -> str:
    """Return the effect of a decision on the run; empty where upstream is fixed, absent or not known yet."""
    breaks = record.overlay.breaks
    verdict = record.finding.verdict if record.finding else None
    if record.decision is Decision.ACTIVE:
        return f"without it: {breaks}"
    if record.decision is Decision.GATED:
        return ""  # the reason has it already, before the remedy
    if not record.overlay.installs and record.decision is Decision.CONFLICT:
        return f"if this is the combination, {breaks}"
    if record.decision is Decision.CONFLICT and record.seams:
        return f"if the code in place does not repair it, {breaks}"
    if verdict is Verdict.BROKEN:
        return f"nothing is installed, so {breaks}"
    if record.decision is Decision.CONFLICT and verdict is Verdict.FIXED:
        return f"nothing is installed; if the loaded code does not repair it, {breaks}"
    if record.decision in UNDECIDED:
        return f"nothing is installed; if upstream is still broken, {breaks}"
    return ""
