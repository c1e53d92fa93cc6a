"""The page of a run: its active overlays with reasons, the releases with each defect, and the retirement conditions."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from megacpp_overlays.concerns import report
from megacpp_overlays.concerns.predicates import Ternary
from megacpp_overlays.concerns.report import Concerns
from megacpp_overlays.loader.decisions import FIRST
from megacpp_overlays.model import Decision, Erratum
from megacpp_overlays.upkeep.audit_diff import Change
from megacpp_overlays.upkeep.matrix import matrix_file, matrix_text
from megacpp_overlays.upkeep.pages import templates

HEADINGS = {
    Decision.CONFLICT: "Not recognised, or not repaired",
    Decision.UNPROVED: "Not proved yet: run megacpp-overlays witness",
    Decision.GATED: "Cannot work together",
    Decision.ACTIVE: "Repaired in this run",
    Decision.RETIRED: "Right upstream, nothing installed",
    Decision.ARMED: "Waiting for an import",
    Decision.DISABLED: "Off",
    Decision.ABSENT: "Not here",
}
"""The heading above the overlays of each decision, in the order of the page."""
_SHA256 = re.compile("[0-9a-f]{64}")
_NEEDS_A_PERSON = frozenset({Decision.CONFLICT, Decision.UNPROVED, Decision.GATED})
_OPEN = _NEEDS_A_PERSON | {Decision.ACTIVE}


class RunOnPage(NamedTuple):
    """The data of a run that its page shows."""

    audit: Mapping[str, Any]
    """Plain data in the form of `audit().as_dict()`; in a receipt or an older version some keys may be missing."""
    made: datetime
    ranks: str | None = None
    """The agreement of the ranks, in a sentence."""
    compared: tuple[str, Sequence[Change]] | None = None
    """The name of an earlier audit, and the changes since."""


def _model(audit: Mapping[str, Any]) -> Concerns:
    """Return the audit's answers about the model; none without `--config`, or where no optimizer took a step."""
    data = audit.get("model")
    return report.from_dict(data if isinstance(data, Mapping) else {})


def _of_model(model: Concerns, overlay_id: str) -> str:
    """Return the reason why an overlay does not concern the model, or may concern it; empty where it does."""
    concern = model.by_id.get(overlay_id)
    if concern is None or concern.answer is Ternary.YES:
        return ""
    verb = "may concern" if concern.answer.concerns else "does not concern"
    return f"{verb} this model: {concern.because}".removesuffix(": ")


def _headline(model: Concerns, active: Collection[str]) -> str | None:
    """Return the number of active overlays that concern the model, as a sentence; None without answers about the model."""
    if not model.by_id:
        return None
    return f"{sum(map(model.is_concerned, active))} of {len(active)} active overlays concern it, {model.origin}"


def agreement(audit: Mapping[str, Any]) -> str | None:
    """Return the agreement of ranks from an audit, as a sentence; None where the ranks were not compared."""
    ranks = audit.get("ranks")
    if not isinstance(ranks, Mapping):
        return None
    size = ranks.get("size")
    return (
        f"all {size} run the same code"
        if ranks.get("agreed")
        else f"the {size} do not run the same code, or not all came"
    )


def render(run: RunOnPage, overlays: Sequence[Erratum], packs: Path) -> str:
    """Return the page.

    Args:
        run: the run.
        overlays: the declarations of this package, for the fields that a kept audit leaves out.
        packs: the inventory, whose kept matrix lists the releases with each defect.

    Raises:
        UpkeepError: the kept matrix cannot be read.
    """
    declared = {each.id: each for each in overlays}
    histories = _histories(packs)
    model = _model(run.audit)
    by_decision: dict[Decision, dict[str, list[Mapping[str, Any]]]] = {decision: {} for decision in HEADINGS}
    overlays_of_run = _by_overlay(run.audit["decisions"])
    for overlay_id in sorted(overlays_of_run, key=model.is_concerned, reverse=True):
        parts = overlays_of_run[overlay_id]
        by_decision[_of(parts)][overlay_id] = parts
    sections = [
        {
            "decision": decision.value,
            "heading": heading,
            "is_open": decision in _OPEN,
            "overlays": [
                {
                    **_overlay(overlay_id, parts, declared.get(overlay_id), histories.get(overlay_id, ())),
                    "of_model": _of_model(model, overlay_id),
                }
                for overlay_id, parts in by_decision[decision].items()
            ],
        }
        for decision, heading in HEADINGS.items()
        if by_decision[decision]
    ]
    return templates.named("run.html.j2", Path(__file__).parent).render(
        audit=run.audit,
        counts_calls=any(count for each in run.audit["decisions"] for count in each.get("calls", {}).values()),
        made=f"{run.made:%Y-%m-%d %H:%M} UTC",
        ranks=run.ranks,
        model=_headline(model, by_decision[Decision.ACTIVE]),
        compared=(run.compared[0], _by_subject(run.compared[1])) if run.compared else None,
        sections=sections,
        counts=[(decision.value, len(each)) for decision, each in by_decision.items() if each],
    )


def _by_subject(changes: Sequence[Change]) -> list[tuple[str, list[Change]]]:
    """Return changes by subject, with hashes of 64 digits shortened for the reader."""
    found: dict[str, list[Change]] = {}
    for each in changes:
        found.setdefault(each.subject, []).append(each._replace(before=_short(each.before), after=_short(each.after)))
    return list(found.items())


def _short(text: str | None) -> str | None:
    return f"{text[:12]}…" if text and _SHA256.fullmatch(text) else text


def _by_overlay(decisions: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for each in decisions:
        found.setdefault(each["id"], []).append(each)
    return found


def _of(parts: Sequence[Mapping[str, Any]]) -> Decision:
    return min((Decision(part["decision"]) for part in parts), key=FIRST.index)


def _histories(packs: Path) -> dict[str, list[tuple[str, str]]]:
    """Return the history of verdicts for each distribution with a column about an overlay, by overlay."""
    found: dict[str, list[tuple[str, str]]] = {}
    for table in matrix_file.read(packs):
        for column in table.columns:
            history = matrix_text.history(table, column.overlay)
            found.setdefault(column.overlay, []).append((table.distribution, history))
    return found


def _overlay(
    overlay_id: str,
    parts: Sequence[Mapping[str, Any]],
    declared: Erratum | None,
    histories: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    first = parts[0]
    return {
        "id": overlay_id,
        "pack": first.get("pack"),
        "title": declared.title if declared else "",
        "brief": _brief(parts, declared),
        "symptoms": declared.symptoms if declared else (),
        "breaks": declared.breaks if declared else "",
        "retire_when": first.get("retire_when", ""),
        "variable": first.get("variable", ""),
        "is_off_by_default": bool(declared and declared.off_by_default),
        "versions": sorted({f"{part.get('distribution', '')} {part.get('version') or ''}".strip() for part in parts}),
        "histories": histories,
        "threads": declared.threads if declared else (),
        "parts": [
            {
                "target": part["target"],
                "decision": part["decision"],
                "verdict": part.get("verdict", "-"),
                "shape": part.get("shape"),
                "proof": part.get("proof"),
                "reason": part.get("reason", ""),
                "evidence": part.get("evidence", []),
                "seams": [*part.get("seams", []), *part.get("rebound", [])],
                "calls": part.get("calls", {}),
            }
            for part in parts
        ],
    }


def _brief(parts: Sequence[Mapping[str, Any]], declared: Erratum | None) -> str:
    """Return the line next to a folded overlay: the reason where a person has to act, else the symptom or the title."""
    decision = _of(parts)
    reasons = [part.get("reason", "") for part in parts if part["decision"] == decision.value]
    if decision in _NEEDS_A_PERSON or declared is None:
        return next(filter(None, reasons), "")
    return declared.symptoms[0] if declared.symptoms else declared.title
