"""The report of a triage, as a table for people and as plain data."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megacpp_overlays.loader.rendering import aligned
from megacpp_overlays.model import Erratum, Verdict
from megacpp_overlays.repro.judge import Sentinel
from megacpp_overlays.upkeep.evidence import PartDecision, ProbeReport
from megacpp_overlays.upkeep.locks import Lock
from megacpp_overlays.upkeep.triage.facts import CaseEvidence, shown
from megacpp_overlays.upkeep.triage.outcomes import UpgradeOutcome
from megacpp_overlays.upkeep.triage.preview import OverlayPreview
from megacpp_overlays.upkeep.triage.triage import OverlayTriage, VersionChange

SCHEMA = 1
_WIDTH = 120
_MOST = 200
"""Maximum number of characters of a case's measurement in the table; JSON has the full text."""
_COLUMNS = ("overlay", "pack", "target", "from", "to", "outcome")
_CHANGES = ("distribution", "from", "to", "")


def heading(before: Lock, after: Lock, changes: Sequence[VersionChange]) -> str:
    """Return the heading of an upgrade: both locks, and the distributions in which they differ."""
    return _heading(f"from {_lock(before)} to {_lock(after)}", changes)


def heading_of_releases(changes: Sequence[VersionChange]) -> str:
    """Return the heading of a move from the installed distributions to other releases."""
    return _heading("from what is installed here to other releases", changes)


def _heading(first: str, changes: Sequence[VersionChange]) -> str:
    rows = [(each.distribution, each.before or "-", each.after or "-", _note_on(each)) for each in changes]
    return "\n".join([first, "", *aligned(_CHANGES, rows), ""])


def table(triaged: Sequence[OverlayTriage], *, brief: bool = False) -> str:
    """Return a row for each overlay and a line of totals; `brief` omits the evidence."""
    outcomes = [(each.overlay, each.facts.before, each.facts.after, each.ruling.outcome.value) for each in triaged]
    head, rule, *rows = aligned(_COLUMNS, [_row(*each) for each in outcomes])
    lines = [head, rule]
    for row, each in zip(rows, triaged, strict=True):
        lines += [row, *([] if brief else _notes(each))]
    return "\n".join([*lines, "", summary(triaged)])


def preview_table(previewed: Sequence[OverlayPreview]) -> str:
    """Return a row for each overlay that is not expected to be absent, and lines with the next steps."""
    shown_here = [each for each in previewed if each.expected is not UpgradeOutcome.ABSENT]
    return "\n".join([*_previews(shown_here), "", *_counted(previewed, "No reproducer ran; without --quick they do.")])


def move_table(previewed: Sequence[OverlayPreview]) -> str:
    """Return a row for each overlay that a move to releases affects, and lines for the other overlays and the next steps."""
    same = [each for each in previewed if each.expected is UpgradeOutcome.KEEP and not _is_news(each)]
    gone = [
        each for each in previewed if each.expected is UpgradeOutcome.ABSENT and each.before.verdict is Verdict.BROKEN
    ]
    news = [each for each in previewed if _is_news(each)]
    lines = _previews(news) if news else ["no overlay is needed anew, and none can be retired"]
    for said, those in (("broken on both sides, and repaired", same), ("broken here, and not there any more", gone)):
        if those:
            lines += ["", *_wrapped([f"{said}: {', '.join(each.overlay.id for each in those)}"])]
    return "\n".join([*lines, "", *_counted(previewed, "From what is known of both releases: nothing ran.")])


def _previews(previewed: Sequence[OverlayPreview]) -> list[str]:
    """Return a row for each overlay, with the reason for those in `_is_news`."""
    rows = [_row(each.overlay, each.before, each.after, each.expected.value) for each in previewed]
    head, rule, *aligned_rows = aligned((*_COLUMNS[:-1], "expected"), rows)
    lines = [head, rule]
    for row, each in zip(aligned_rows, previewed, strict=True):
        lines += [row, *(_wrapped([each.reason]) if _is_news(each) else [])]
    return lines


def _is_news(each: OverlayPreview) -> bool:
    """Return whether an upgrade changes something for an overlay."""
    if each.expected is UpgradeOutcome.KEEP:
        return each.before.verdict in {Verdict.ABSENT, Verdict.FIXED}
    return each.expected is not UpgradeOutcome.ABSENT


def _counted(previewed: Sequence[OverlayPreview], rests_on: str) -> list[str]:
    """Return the number of overlays by expected outcome with the basis of the expectation, and the next step."""
    count = Counter(each.expected for each in previewed)
    lines = [f"{', '.join(f'{count[each]} {each.value}' for each in UpgradeOutcome if count[each])}. {rests_on}"]
    if count[UpgradeOutcome.WITNESS]:
        lines.append("`megacpp-overlays witness` in the new environment decides the parts that are not recognised.")
    return lines


def preview_as_dict(
    before: Lock | None, after: Lock | None, changes: Sequence[VersionChange], previewed: Sequence[OverlayPreview]
) -> dict[str, Any]:
    """Return plain data with stable keys; both locks are None for a move to releases."""
    overlays = [
        {
            "id": each.overlay.id,
            "pack": each.overlay.pack,
            "expected": each.expected.value,
            "reason": each.reason,
            "from": _probed_as_dict(each.before),
            "to": _probed_as_dict(each.after),
        }
        for each in previewed
    ]
    return {**_upgrade_as_dict(before, after, changes), "overlays": overlays}


def is_nothing_expected(previewed: Sequence[OverlayPreview]) -> bool:
    """Return whether no overlay needs a person, or a reproducer, on the other side."""
    return all(each.expected in {UpgradeOutcome.KEEP, UpgradeOutcome.ABSENT} for each in previewed)


def summary(triaged: Sequence[OverlayTriage]) -> str:
    """Return one line: the number of overlays by outcome, and the next step."""
    count = Counter(each.ruling.outcome for each in triaged)
    counted = ", ".join(f"{count[outcome]} {outcome.value}" for outcome in UpgradeOutcome if count[outcome])
    if count[UpgradeOutcome.CONFLICT]:
        return f"{counted}. Settle each conflict before the upgrade."
    if count[UpgradeOutcome.RETIRE]:
        return f"{counted}. Upgrade, and retire what upstream has absorbed."
    return f"{counted}. The upgrade changes nothing for the overlays."


def as_dict(
    before: Lock, after: Lock, changes: Sequence[VersionChange], triaged: Sequence[OverlayTriage]
) -> dict[str, Any]:
    """Return plain data with stable keys."""
    return {**_upgrade_as_dict(before, after, changes), "overlays": [_overlay_as_dict(each) for each in triaged]}


def _upgrade_as_dict(before: Lock | None, after: Lock | None, changes: Sequence[VersionChange]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "from": None if before is None else _lock_as_dict(before),
        "to": None if after is None else _lock_as_dict(after),
        "changes": [
            {"distribution": each.distribution, "from": each.before, "to": each.after, "target": each.is_target}
            for each in changes
        ],
    }


def is_clean(triaged: Sequence[OverlayTriage]) -> bool:
    """Return whether no overlay is in conflict or to be retired."""
    return not any(each.ruling.outcome in {UpgradeOutcome.CONFLICT, UpgradeOutcome.RETIRE} for each in triaged)


def _lock(lock: Lock) -> str:
    return f"{lock.path} (lane {lock.lane}{f', Python {lock.python}' if lock.python else ''})"


def _note_on(change: VersionChange) -> str:
    word = "added" if change.before is None else "removed" if change.after is None else ""
    return ", ".join(filter(None, [word, "target of overlays" if change.is_target else ""]))


def _row(overlay: Erratum, before: ProbeReport, after: ProbeReport, outcome: str) -> tuple[str, ...]:
    versions = [
        f"{name} {old or '-'} -> {new or '-'}" if (old := before.versions.get(name)) != new else f"{name} {new or '-'}"
        for name, new in after.versions.items()
    ]
    verdicts = (before.verdict.value, after.verdict.value)
    return overlay.id, f"{overlay.pack:02}", ", ".join(versions), *verdicts, outcome


def _notes(each: OverlayTriage) -> list[str]:
    notes = [f"{each.ruling.outcome.value}: {each.ruling.reason}", *_shapes(each.facts.before, each.facts.after)]
    notes += _cases(shown(each.facts))
    notes += [f"next: {each.ruling.to_do}"] if each.ruling.to_do else []
    return _wrapped([*notes, f"delete when: {each.overlay.retire_when}"])


def _wrapped(notes: Sequence[str]) -> list[str]:
    return [
        line
        for note in notes
        for line in textwrap.wrap(
            note,
            _WIDTH,
            initial_indent="    ",
            subsequent_indent="      ",
            break_on_hyphens=False,
            break_long_words=False,
        )
    ]


def _cases(cases: Sequence[CaseEvidence]) -> list[str]:
    """Return a line for each case that ran here, then lines for the other cases by receipt or by reason."""
    lines = []
    elsewhere: dict[str, list[str]] = {}
    for case in cases:
        if case.receipt is not None:
            words = " and ".join(said.sentinel.value for said in case.said)
            elsewhere.setdefault(f"receipt {case.receipt}", []).append(f"{case.case} {words}")
        elif blocked := next((said for said in case.said if said.sentinel is Sentinel.BLOCKED), None):
            elsewhere.setdefault(f"not run, {blocked.reason}", []).append(case.case)
        else:
            lines += [f"{said.sentinel.value} {case.case}: {_short(said.reason)}" for said in case.said]
    return [*lines, *(f"{where}: {'; '.join(names)}" for where, names in elsewhere.items())]


def _short(reason: str) -> str:
    return textwrap.shorten(reason, _MOST, placeholder=" ...")


def _shapes(before: ProbeReport, after: ProbeReport) -> list[str]:
    if not before.shapes and not after.shapes:
        return []
    old, new = (", ".join(probed.shapes) or probed.verdict.value for probed in (before, after))
    return [f"shape: {old} -> {new}" if old != new else f"shape: {new}"]


def _lock_as_dict(lock: Lock) -> dict[str, str | None]:
    return {"lock": str(lock.path), "lane": lock.lane, "python": lock.python, "platform": lock.platform}


def _overlay_as_dict(each: OverlayTriage) -> dict[str, Any]:
    return {
        "id": each.overlay.id,
        "pack": each.overlay.pack,
        "outcome": each.ruling.outcome.value,
        "reason": each.ruling.reason,
        "next": each.ruling.to_do or None,
        "from": _probed_as_dict(each.facts.before),
        "to": _probed_as_dict(each.facts.after),
        "due": each.facts.after.due,
        "decided": _decided_as_list(each.facts.decided),
        "cases": [
            {
                "case": case.case,
                "said": [{"sentinel": said.sentinel.value, "reason": said.reason} for said in case.said],
                "receipt": case.receipt,
            }
            for case in shown(each.facts)
        ],
        "retire_when": each.overlay.retire_when,
    }


def _decided_as_list(decided: tuple[PartDecision, ...] | str) -> list[dict[str, str]] | None:
    if isinstance(decided, str):
        return None
    return [{"target": each.target, "decision": each.decision.value, "reason": each.reason} for each in decided]


def _probed_as_dict(probed: ProbeReport) -> dict[str, Any]:
    return {
        "verdict": probed.verdict.value,
        "shapes": list(probed.shapes),
        "evidence": probed.evidence,
        "versions": dict(probed.versions),
    }
