"""The kept matrix as one HTML page, which loads no other resource and has the same bytes for the same tables.

A reader picks the versions of a run, in the form or in the address (`#megatron-core=0.18.2`), and a few lines of script show the
overlays that matter to the run. Without script the page shows the newest releases, and the address leads to the list of a release.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megacpp_overlays.loader import registry
from megacpp_overlays.model import Erratum, Evidence, Gate, Verdict
from megacpp_overlays.upkeep.matrix import matrix_text
from megacpp_overlays.upkeep.matrix.matrix import UPLOADED, Column, Streak, Table, flips, is_left_alone, runs
from megacpp_overlays.upkeep.matrix.release_pages import page_of
from megacpp_overlays.upkeep.pages import templates

MEANINGS = {
    Verdict.BROKEN: "the code is there, and so is the defect",
    Verdict.FIXED: "the code is there, and upstream no longer has the defect",
    Verdict.ABSENT: "there is no such code in this release",
    Verdict.UNRECOGNISED: "the code has a form that the probe does not know: it says nothing, and nothing is installed",
}


def render(tables: Sequence[Table]) -> str:
    """Return the page for these tables."""
    declared = {each.id: each for each in registry.load()}
    return templates.named("matrix.html.j2", Path(__file__).parent).render(
        asked=", ".join(sorted({table.asked for table in tables})),
        meanings=[(verdict.value, text) for verdict, text in MEANINGS.items()],
        distributions=[_distribution(table, declared) for table in tables],
    )


def _distribution(table: Table, declared: Mapping[str, Erratum]) -> dict[str, Any]:
    every = [flip for column in table.columns for flip in flips(table, column.overlay)]
    order = {row.name: number for number, row in enumerate(table.rows)}
    anchors = {column.overlay: _anchors(table, column) for column in table.columns}
    return {
        "name": table.distribution,
        "other_dates": any(row.dated != UPLOADED for row in table.rows),
        "columns": [_column(table, column, anchors[column.overlay], declared) for column in table.columns],
        "rows": [
            {
                "name": row.name,
                "page": page_of(table.distribution, row.name),
                "dated": matrix_text.dated(row),
                "file": row.source,
                "sha256": row.sha256,
                "yanked": row.yanked,
                "broken": [
                    column.overlay
                    for column in table.columns
                    if row.problem is None and row.cells[column.overlay].verdict is Verdict.BROKEN
                ],
            }
            for row in reversed(table.rows)
        ],
        "flips": [
            {
                "overlay": flip.overlay,
                "before": flip.before.value,
                "after": flip.after.value,
                "release": flip.row.name,
                "page": page_of(table.distribution, flip.row.name),
                "date": matrix_text.dated(flip.row),
                "anchor": anchors[flip.overlay][flip.row.name],
            }
            for flip in sorted(every, key=lambda flip: -order[flip.row.name])
        ],
    }


def _periods(table: Table, column: Column) -> list[dict[str, Any]]:
    """Return the groups of neighbouring releases with one verdict and one `is_left_alone`, newest first."""
    found = []
    said = lambda row: (row.cells[column.overlay].verdict, is_left_alone(row.cells[column.overlay], column))  # noqa: E731
    for (verdict, left_alone), group in itertools.groupby((row for row in table.rows if row.problem is None), key=said):
        rows = list(group)
        span = matrix_text.span(Streak(rows[0], rows[-1], rows[0].cells[column.overlay]))
        names = [row.name for row in rows]
        found.append({"verdict": verdict.value, "left_alone": left_alone, "span": span, "names": names})
    return found[::-1]


def _anchors(table: Table, column: Column) -> dict[str, str]:
    """Return the anchor of each release's evidence on the page, by release."""
    found: dict[str, str] = {}
    rows = [row.name for row in table.rows]
    for run in runs(table.rows, column.overlay):
        first, last = rows.index(run.first.name), rows.index(run.last.name)
        found |= dict.fromkeys(rows[first : last + 1], f"{column.overlay}-{run.first.name}")
    return found


def _column(table: Table, column: Column, anchors: dict[str, str], declared: Mapping[str, Erratum]) -> dict[str, Any]:
    erratum = declared.get(column.overlay)
    return {
        "overlay": column.overlay,
        "is_gate": column.kind == Gate.kind,
        "beside": column.beside,
        "speaks_of": () if erratum is None else erratum.companions,
        "periods": _periods(table, column),
        "threads": () if erratum is None else erratum.threads,
        "pack": f"{column.pack:02}",
        "title": column.title,
        "breaks": column.breaks,
        "retire_when": column.retire_when,
        "history": matrix_text.history(table, column.overlay),
        "targets": [str(target) for target in column.targets],
        "left_alone": list(column.left_alone.items()),
        "probes": [(name.rpartition(".")[2], digest) for name, digest in column.probes.items()],
        "runs": [
            {
                "span": matrix_text.span(run),
                "anchor": anchors[run.first.name],
                "verdict": run.cell.verdict.value,
                "parts": [
                    {
                        "module": part.module if len(run.cell.parts) > 1 else None,
                        "verdict": part.verdict.value if part.verdict is not run.cell.verdict else None,
                        "shape": part.shape,
                        "seen": [(each.seen, _place(each)) for each in part.evidence],
                    }
                    for part in run.cell.telling
                ],
            }
            for run in reversed(runs(table.rows, column.overlay))
        ],
    }


def _place(evidence: Evidence) -> str | None:
    return f"{evidence.file}:{evidence.line}" if evidence.line else evidence.file
