"""Records as text and as plain data: a line of a log, a row of the table of an audit, keys of its JSON."""

from __future__ import annotations

from collections.abc import Sequence

from megacpp_overlays import terminal_text
from megacpp_overlays.model import Decision, Record, Verdict

CAN_BE_SWITCHED_OFF = frozenset({Decision.ACTIVE, Decision.CONFLICT, Decision.GATED})
"""Decisions whose reader may want the variable that ends them."""
CAN_BE_DELETED = CAN_BE_SWITCHED_OFF | {Decision.RETIRED}
"""Decisions whose reader may ask how long this goes on."""

_COLUMNS = ("overlay", "pack", "decision", "verdict", "shape", "target")
_WIDTH = 110


def table(records: Sequence[Record]) -> list[str]:
    """Return records as the lines of a table, each row with notes below it."""
    head, rule, *rows = aligned(_COLUMNS, [_row(record) for record in records])
    lines = [head, rule]
    for row, record in zip(rows, records, strict=True):
        lines += [row, *_notes(record)]
    return lines


def _row(record: Record) -> tuple[str, ...]:
    overlay = record.overlay
    target = f"{overlay.target.distribution} {record.version or ''}".strip()
    pack = f"{overlay.pack:02}"
    return overlay.id, pack, record.decision.value, record.verdict, record.shape, target


def _notes(record: Record) -> list[str]:
    import textwrap  # noqa: PLC0415 - a line of a log does not wrap

    notes = [record.reason, consequence(record)]
    if record.seams:
        notes.append(f"replaced: {', '.join((*record.seams, *record.rebound))}")
    if record.decision in CAN_BE_SWITCHED_OFF:
        notes.append(f"off: {record.overlay.variable}=off")
    if record.decision in CAN_BE_DELETED:
        notes.append(f"delete when: {record.overlay.retire_when}")
    return [
        line
        for note in notes
        for line in textwrap.wrap(terminal_text.lines(note), _WIDTH, initial_indent="    ", subsequent_indent="      ")
    ]


def line(record: Record) -> str:
    """Return a decision as one line that needs no other line to be understood."""
    overlay = record.overlay
    version = f" {record.version}" if record.version else ""
    head = f"{record.decision.value}: {overlay.id} (pack {overlay.pack:02}) on {overlay.target.distribution}{version}"
    parts = [head, record.reason]
    if record.decision is Decision.ACTIVE:
        parts += [f"shape {record.shape}", f"replaced {', '.join(record.seams)}"]
        parts += [f"rebound {', '.join(record.rebound)}"] if record.rebound else []
    parts += [consequence(record)] if consequence(record) else []
    if record.decision in CAN_BE_DELETED:
        parts.append(f"delete when {overlay.retire_when}")
    if record.decision in CAN_BE_SWITCHED_OFF:
        parts.append(f"off: {overlay.variable}=off")
    return " | ".join(parts)


def consequence(record: Record) -> str:
    """Return what the decision means for the run; empty where upstream is fixed, absent or not known yet."""
    breaks = record.overlay.breaks
    verdict = record.finding.verdict if record.finding else None
    if record.decision is Decision.ACTIVE:
        return f"without it: {breaks}"
    if record.decision is Decision.GATED:
        return ""  # the reason says it, before it says what to do
    if not record.overlay.installs and record.decision is Decision.CONFLICT:
        return f"if this is the combination, {breaks}"
    if record.decision is Decision.CONFLICT and record.seams:
        return f"if what is there now does not repair it, {breaks}"
    if verdict is Verdict.BROKEN:
        return f"nothing is installed, so {breaks}"
    if record.decision is Decision.CONFLICT and verdict is Verdict.FIXED:
        return f"nothing is installed; if what is loaded does not repair it, {breaks}"
    if record.decision is Decision.CONFLICT:
        return f"nothing is installed; if upstream is still broken, {breaks}"
    return ""


def as_dict(record: Record) -> dict[str, object]:
    """Return a decision as plain data with stable keys."""
    overlay, finding = record.overlay, record.finding
    return {
        "id": overlay.id,
        "pack": overlay.pack,
        "decision": record.decision.value,
        "verdict": record.verdict,
        "shape": finding.shape if finding else None,
        "distribution": overlay.target.distribution,
        "version": record.version,
        "target": str(overlay.target),
        "reason": record.reason,
        "proof": record.proof,
        "repair": [str(item) for item in finding.repair] if finding else [],
        "looks_repaired": finding.looks_repaired if finding else False,
        "evidence": [str(item) for item in finding.evidence] if finding else [],
        "source_sha256": record.source_sha256,
        "seams": list(record.seams),
        "rebound": list(record.rebound),
        "retire_when": overlay.retire_when,
        "variable": overlay.variable,
    }


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a head, a rule below it and rows as lines, each column as wide as its widest cell."""
    rows = [[terminal_text.one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [_padded(row, widths) for row in (head, ["-" * width for width in widths], *rows)]


def _padded(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
