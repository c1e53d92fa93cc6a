"""Lines of a log: one for each active overlay, one for each warning, one with the counts, and all details of a decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megacpp_overlays.loader.decisions import ATTENTION, COUNTED, FIRST, TRAITS, WARNED
from megacpp_overlays.loader.fields import fields, titled
from megacpp_overlays.model import Decision, Erratum, Record, Verdict

HEAD = "[megacpp_overlays] "
"""Prefix of a line on a terminal or in a file; on ranks other than the first it also has the number of the rank."""
_MOST_NAMED = 3
"""Most overlays without a call that a line lists by name."""
LONGEST = 160
"""Characters of the line of an active overlay, including its prefix: it fits one line of a wide terminal."""

WITNESS = "megacpp-overlays witness"
"""The command that proves everything that is unproved."""


def of_decision(record: Record) -> str:
    """Return the log line of a decision at the level `info`; empty for a decision that only the count includes."""
    verdict = record.finding.verdict if record.finding else None
    if record.decision is Decision.ACTIVE:
        return active(record.overlay)
    if record.decision is Decision.UNPROVED:
        return unproved(record)
    if is_warning(record):
        return warning(record)
    if record.decision is Decision.DISABLED and verdict is Verdict.BROKEN and not record.overlay.off_by_default:
        return f"off: {titled(record.overlay)}, so {record.overlay.breaks}"
    return ""


def active(overlay: Erratum) -> str:
    """Return the line of an active overlay, at most `LONGEST` characters with its prefix: the repair, and the condition to delete it."""
    head, middle = f"active: {titled(overlay)} repairs ", "; delete when "
    left = LONGEST - len(HEAD) - len(head) - len(middle)
    if overlay.brief and overlay.until:
        return f"{head}{overlay.brief}{middle}{overlay.until}"
    import textwrap  # noqa: PLC0415 - overlays of this package have `brief` and `until`

    until = textwrap.shorten(overlay.retire_when, max(left // 2, left - len(overlay.title)), placeholder=" ...")
    title = textwrap.shorten(overlay.title, left - len(until) - 2, placeholder=" ...")
    return f'{head}"{title}"{middle}{until}'


def is_warning(record: Record) -> bool:
    """Return whether a decision is logged as a warning."""
    return record.decision in WARNED


def unproved(record: Record) -> str:
    """Return the single line for all overlays that are unproved on a release."""
    return (
        f"WARNING unproved: {fields(record).installed} is not a release that this package knows; overlays whose defect may be in it "
        f"are not installed until their reproducers have run on it | what to do: {WITNESS}"
    )


def warning(record: Record) -> str:
    """Return the warning line of a decision: the problem, its effect on the run, and the remedy."""
    overlay, found = record.overlay, fields(record)
    where = f"{overlay.target.module}, {found.installed}"
    is_conflict = record.decision is Decision.CONFLICT
    parts = [
        f"WARNING {record.decision.value}: {found.name} on {where}: {found.reason}",
        found.effect,
        f"what to do: megacpp-overlays audit {overlay.id}" if is_conflict else f"delete when {found.deleted}",
        f"off: {found.off}",
    ]
    return " | ".join(filter(None, parts))


def detail(record: Record) -> str:
    """Return all fields of a decision in one self-contained line."""
    found = fields(record)
    parts = [
        f"{record.decision.value}: {found.name} on {found.installed}",
        found.verdict,
        found.reason,
        f"replaced in {record.overlay.target.module}: {', '.join(found.seams)}" if found.seams else "",
        found.effect,
        f"delete when {found.deleted}" if found.deleted else "",
        f"off: {found.off}" if found.off else "",
    ]
    return " | ".join(filter(None, parts))


def by_overlay(records: Sequence[Record]) -> dict[str, Decision]:
    """Return one decision for each id; if the decisions of its parts differ, the most important one."""
    found: dict[str, Decision] = {}
    for record in records:
        other = found.get(record.overlay.id, record.decision)
        found[record.overlay.id] = min(other, record.decision, key=FIRST.index)
    return found


def counted(records: Sequence[Record]) -> str:
    """Return the number of overlays for each decision: `6 active, 2 retired, 0 conflict, 11 absent`."""
    counts = Counter(by_overlay(records).values())
    shown = [decision for decision in COUNTED if counts[decision] or TRAITS[decision].is_always_counted]
    return ", ".join(f"{counts[decision]} {TRAITS[decision].word or decision.value}" for decision in shown)


def calls(records: Sequence[Record]) -> dict[str, int]:
    """Return the number of calls of the seams of each active overlay; empty if none was called, as before a run."""
    found = _call_counts(records)
    return found if any(found.values()) else {}


def _call_counts(records: Sequence[Record]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for record in records:
        if record.decision is Decision.ACTIVE and record.calls:
            found[record.overlay.id] += sum(count for _, count in record.calls)
    return dict(found)


def never_called(records: Sequence[Record]) -> list[str]:
    """Return the ids of active overlays whose seams count their calls and were never called."""
    return [name for name, count in _call_counts(records).items() if not count]


def unused(records: Sequence[Record]) -> str:
    """Return a short text that names the active overlays that were never called; empty if all were."""
    names = never_called(records)
    if not names:
        return ""
    if len(names) <= _MOST_NAMED:
        named = ", ".join(names)
    elif len(names) == sum(decision is Decision.ACTIVE for decision in by_overlay(records).values()):
        named = f"all {len(names)}"
    else:
        first = names[: _MOST_NAMED - 1]
        named = f"{', '.join(first)} and {len(names) - len(first)} more"
    return f"active and never called: {named}"


def summary(version: str, mode: str, records: Sequence[Record], fingerprint: str, *, at_exit: bool = False) -> str:
    """Return the line with the counts and the overlays that need attention; at the end of a process also those never called."""
    decided = by_overlay(records)
    looked_at = [name for name, decision in decided.items() if decision in ATTENTION]
    head = version if mode == "auto" else f"{version}, mode {mode}"
    proof = f"; unproved: {WITNESS}" if Decision.UNPROVED in decided.values() else ""
    needed = f"; look at {', '.join(looked_at)}: megacpp-overlays audit" if looked_at else ""
    never = f"; {text}" if at_exit and (text := unused(records)) else ""
    return f"{head}: {counted(records)} (fingerprint {fingerprint}){proof}{needed}{never}"
