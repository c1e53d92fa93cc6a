"""The matrix as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from megacpp_overlays.loader.rendering import aligned
from megacpp_overlays.model import Overlay, Verdict
from megacpp_overlays.upkeep.matrix.matrix import (
    Cell,
    Column,
    Flip,
    PartFinding,
    Row,
    Streak,
    Table,
    flips,
    is_left_alone,
    runs,
)

_WIDTH = 110
LEGEND = """\
BROKEN  the defect is there    FIXED  upstream no longer has it    -  ABSENT: no such code    UNRECOGNISED  a form that
the probe does not know        *  not as in the release before     ~  broken in a form that the overlay leaves alone"""


def render(table: Table, *, evidence: bool) -> str:
    """Return one distribution as text, newest release last.

    Args:
        table: the table of the distribution.
        evidence: whether to add the evidence of the probes.
    """
    count = f"{len(table.rows)} releases, the index asked on {table.asked}"
    numbered = [[str(number), *_summary(table, column)] for number, column in enumerate(table.columns, start=1)]
    lines = [
        f"{table.distribution}: {count}",
        "",
        *aligned(["", "overlay or gate", "pack", "by release"], numbered),
        "",
    ]
    head = ["release", "date", *(str(number) for number in range(1, len(table.columns) + 1)), ""]
    lines += aligned(head, list(_rows(table)))
    if evidence:
        for column in table.columns:
            lines += ["", column.overlay]
            for run in (*runs(table.rows, column.overlay), *_each(table.trees, column.overlay)):
                lines += _evidence(run)
    return "\n".join(lines)


def history(table: Table, overlay: str) -> str:
    """Return the verdicts about an overlay through the releases, as one line."""
    changes = flips(table, overlay)
    first = next((row for row in table.rows if row.problem is None), None)
    if first is None:
        return "nothing could be read"
    if not changes:
        return f"{first.cells[overlay].verdict.value} in all"
    return ", ".join([changes[0].before.value, *map(_since, changes)])


def dated(row: Row) -> str:
    """Return the date of a row, with the dated event where it is not the upload of a release."""
    if row.date is None:
        return "no date"
    return row.date if row.dated == "uploaded" else f"{row.date} {row.dated}"


def span(run: Streak) -> str:
    """Return the releases of a streak: `0.19.0`, or `0.13.0 to 0.15.3`."""
    return run.first.name if run.first is run.last else f"{run.first.name} to {run.last.name}"


def seen(part: PartFinding, *, named: bool) -> str:
    """Return the evidence of a part as one line, with its module if `named`."""
    text = "; ".join(map(str, part.evidence))
    shape = f"{part.shape}: " if part.shape else ""
    return f"{part.module.rpartition('.')[2]}: {shape}{text}" if named else f"{shape}{text}"


def _since(flip: Flip) -> str:
    return f"{flip.after.value} since {flip.row.name} ({dated(flip.row)})"


def _summary(table: Table, column: Column) -> list[str]:
    name = column.overlay if column.kind == Overlay.kind else f"{column.overlay}, a {column.kind}"
    prefix = "" if column.beside is None else f"beside {column.beside}: "
    return [name, f"{column.pack:02}", prefix + history(table, column.overlay)]


def _rows(table: Table) -> Iterator[list[str]]:
    flipped = {(flip.row.name, flip.overlay) for column in table.columns for flip in flips(table, column.overlay)}
    for row in (*table.rows, *table.trees):
        note = "" if row.yanked is None else f"yanked: {row.yanked}" if row.yanked else "yanked"
        if row in table.trees:
            note = row.source
        if row.problem is not None:
            yield [row.name, dated(row), *("" for _ in table.columns), f"not read: {row.problem}"]
            continue
        cells = [
            _word(row.cells[column.overlay], column)
            + (" *" if row in table.rows and (row.name, column.overlay) in flipped else "")
            for column in table.columns
        ]
        yield [row.name, dated(row), *cells, note]


def _word(cell: Cell, column: Column) -> str:
    if cell.verdict is Verdict.ABSENT:
        return "-"
    return str(cell.verdict.value) + (" ~" if is_left_alone(cell, column) else "")


def _each(rows: tuple[Row, ...], overlay: str) -> list[Streak]:
    return [Streak(row, row, row.cells[overlay]) for row in rows]


def _evidence(run: Streak) -> list[str]:
    lines = [f"  {span(run)}  {run.cell.verdict.value}"]
    telling = run.cell.telling
    for part in telling:
        text = seen(part, named=len(run.cell.parts) > 1)
        lines += textwrap.wrap(text, _WIDTH, initial_indent="      ", subsequent_indent="        ")
    return lines
