"""Rendering of an audit as plain data, and of tables as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from megacpp_overlays import terminal_text
from megacpp_overlays.model import Record


class DecisionData(TypedDict):
    """One decision as plain data; `audit.schema.json` is the schema of its JSON."""

    id: str
    pack: int
    decision: str
    verdict: str
    shape: str | None
    distribution: str
    version: str | None
    target: str
    reason: str
    proof: str | None
    proved_by: str | None
    repair: list[str]
    looks_repaired: bool
    evidence: list[str]
    source_sha256: str | None
    seams: list[str]
    rebound: list[str]
    calls: dict[str, int]
    retire_when: str
    variable: str
    concerns: str


class AuditData(TypedDict):
    """An audit as plain data, fit for a checkpoint or an experiment tracker."""

    schema: int
    package: str
    version: str
    mode: str
    fingerprint: str
    decisions: list[DecisionData]


class AgreementData(TypedDict):
    """The result of the comparison of the ranks of a run."""

    size: int
    agreed: bool
    """False also if a rank did not arrive."""


class AuditWithCopiesData(AuditData, total=False):
    """An audit of a process in which a kernel of the Hugging Face Hub copies code of an upstream."""

    hub_copies: list[str]


class ModelData(TypedDict):
    """The origin of a model's configuration, and the overlays that concern the model; see `concerns.report`."""

    origin: str
    concerns: dict[str, str]
    """`yes`, `no` or `undecided` by id."""
    because: dict[str, str]
    """The reason for `no` or `undecided`, by id."""


class LeftAuditData(AuditWithCopiesData, total=False):
    """An audit that rank 0 left in a file, or that was requested with the configuration of a model."""

    model: ModelData
    ranks: AgreementData


def as_dict(record: Record) -> DecisionData:
    """Return a decision as plain data with stable keys."""
    from megacpp_overlays.loader.provenance import provenance  # noqa: PLC0415 - only a report asks for it

    overlay, finding, known = record.overlay, record.finding, provenance(record)
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
        "proved_by": known.value if known else None,
        "repair": [str(item) for item in finding.repair] if finding else [],
        "looks_repaired": finding.looks_repaired if finding else False,
        "evidence": [str(item) for item in finding.evidence] if finding else [],
        "source_sha256": record.source_sha256,
        "seams": list(record.seams),
        "rebound": list(record.rebound),
        "calls": dict(record.calls),
        "retire_when": overlay.retire_when,
        "variable": overlay.variable,
        "concerns": overlay.concerns,
    }


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as lines: the head, a rule below it and the rows, each column as wide as its widest cell."""
    rows = [[terminal_text.one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [_padded(row, widths) for row in (head, ["-" * width for width in widths], *rows)]


def _padded(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
