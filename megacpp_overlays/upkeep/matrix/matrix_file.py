"""The kept matrix: `matrix.json` next to `matrix.html`, and the comparison of its data with the present findings of the probes.

The data names every file that was read by its SHA-256, so that any user can read the same bytes again. It holds no address.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megacpp_overlays import json_text
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.model import Erratum, Evidence, Target, Verdict
from megacpp_overlays.upkeep.matrix import combinations, matrix
from megacpp_overlays.upkeep.matrix.archives import Archives
from megacpp_overlays.upkeep.matrix.matrix import Cell, Column, PartFinding, Row, Table
from megacpp_overlays.upkeep.matrix.releases import ArchiveFile, IndexAnswer, in_order, release

SCHEMA = 2
NAME, PAGE = "matrix.json", "matrix.html"


def to_data(tables: Sequence[Table]) -> dict[str, Any]:
    """Return tables as data for JSON."""
    return {"schema": SCHEMA, "distributions": [_table(each) for each in tables]}


def to_text(tables: Sequence[Table]) -> str:
    """Return the text of `matrix.json` for these tables."""
    return data_to_text(to_data(tables))


def data_to_text(data: dict[str, Any]) -> str:
    """Return data as JSON with every finding on a line of its own; the data is modified in place."""
    short: list[str] = []
    for each in data["distributions"]:
        for row in (*each["releases"], *each.get("trees", ())):
            for name, parts in row["overlays"].items():
                short.append(json.dumps(parts, ensure_ascii=False))
                row["overlays"][name] = f"\0{len(short) - 1}\0"
    text = json.dumps(data, indent=1, ensure_ascii=False)
    pieces = text.split('"\\u0000')
    return pieces[0] + "".join(short[int(n)] + rest for n, rest in (p.split('\\u0000"', 1) for p in pieces[1:])) + "\n"


def read(folder: Path) -> tuple[Table, ...]:
    """Return the kept tables.

    Raises:
        UpkeepError: the file is missing or cannot be read.
    """
    path = folder / NAME
    try:
        return parse(path.read_text(), str(path))
    except OSError as error:
        raise UpkeepError(f"{path}: cannot read it: {error.strerror}; make it with --write") from error


def parse(text: str, path: str) -> tuple[Table, ...]:
    """Return the tables in the text of a `matrix.json`.

    Raises:
        UpkeepError: the text is no kept matrix; the message names the path.
    """
    try:
        data = json_text.parse(text)
        if data["schema"] != SCHEMA:
            raise UpkeepError(f"{path}: schema {data['schema']!r} is not known here; write it anew with --write")
        return tuple(_read_table(each) for each in data["distributions"])
    except (KeyError, TypeError, ValueError) as error:
        raise UpkeepError(f"{path}: this is no kept matrix: {type(error).__name__}: {error}") from error


def answers(tables: Sequence[Table]) -> dict[str, IndexAnswer]:
    """Return the index answers that correspond to these tables, by distribution."""
    return {table.distribution: _answer(table) for table in tables}


def again(
    tables: Sequence[Table], overlays: Sequence[Erratum], archives: Archives, tell: Callable[[str], None]
) -> tuple[Table, ...]:
    """Probe the releases of kept tables again, with the present overlays.

    Raises:
        UpkeepError: an archive is not on this machine.
    """
    known = answers(tables)
    chosen = matrix.choose(overlays, None)
    made = []
    with ExitStack() as stack:
        for name, answer in known.items():
            if name in chosen:
                partners = combinations.partners(chosen[name], lambda each: _known(known, each), archives, stack)
                made.append(matrix.table(chosen[name], answer, archives, pre=True, tell=tell, beside=partners))
    complete(made)
    return tuple(made)


def _known(answers: Mapping[str, IndexAnswer], name: str) -> IndexAnswer:
    if name not in answers:
        raise UpkeepError(
            f"{name} is not in the kept matrix, and releases in it are read together with one of it; use --write"
        )
    return answers[name]


def complete(tables: Sequence[Table]) -> None:
    """Check that every release could be read, because a kept matrix must have no gaps.

    Raises:
        UpkeepError: a release could not be read; the message names each such release and the reason.
    """
    missing = [
        f"{table.distribution} {row.name}: {row.problem}" for table in tables for row in table.rows if row.problem
    ]
    if missing:
        raise UpkeepError("not every release can be read\n  " + "\n  ".join(missing))


def differences(kept: Sequence[Table], now: Sequence[Table], overlays: Sequence[Erratum]) -> list[str]:
    """Return the differences between kept tables and newly probed tables, one line each."""
    wanted, have = list(matrix.choose(overlays, None)), [table.distribution for table in kept]
    found = [f"{name}: it is not in the kept matrix" for name in wanted if name not in have]
    found += [f"{name}: no overlay is about it any more" for name in have if name not in wanted]
    fresh = {table.distribution: table for table in now}
    for table in kept:
        if table.distribution in fresh:
            found += _changes(table, fresh[table.distribution])
    return found


def newer(table: Table, answer: IndexAnswer) -> list[str]:
    """Return the differences between a kept table and an index's answer: final releases, their dates, files and yanks."""
    name, kept = table.distribution, {row.name: row for row in table.rows}
    final = {each.version: each for each in answer.read if each.is_final}
    found = [f"{name} {version} ({each.date}) came since" for version, each in final.items() if version not in kept]
    found += [f"{name} {version}: the index no longer has it" for version in kept if version not in final]
    for row, each in ((row, final[version]) for version, row in kept.items() if version in final):
        if row.yanked != each.yanked:
            found.append(f"{name} {row.name}: the index says something else about its being yanked")
        if each.date is not None and (row.date, row.dated) != (each.date, matrix.UPLOADED):
            uploaded = f"the index says that it was uploaded on {each.date}"
            found.append(f"{name} {row.name}: {row.date} is kept, {uploaded}")
        if (row.source, row.sha256) not in {(file.name, file.sha256) for file in each.files}:
            found.append(f"{name} {row.name}: the index has no {row.source} with the SHA-256 that is kept")
    return found


def _changes(kept: Table, now: Table) -> list[str]:
    name = kept.distribution
    old, new = ({column.overlay: column for column in table.columns} for table in (kept, now))
    found = [f"{name}: {overlay} is not in the kept matrix" for overlay in new if overlay not in old]
    found += [f"{name}: there is no {overlay} any more" for overlay in old if overlay not in new]
    if not found and list(old) != list(new):
        found.append(f"{name}: the overlays are in another order")
    for overlay, column in old.items():
        if overlay in new and column != new[overlay]:
            subject = "the probe is" if column.probes != new[overlay].probes else "the declaration is"
            found.append(f"{name}: {overlay}: {subject} not the one that the kept matrix was made with")
    rows = {row.name: row for row in now.rows}
    for row in kept.rows:
        for overlay in (each for each in row.cells if each in new):
            before, after = row.cells[overlay], rows[row.name].cells[overlay]
            if before.verdict is not after.verdict:
                change = f"{before.verdict.value} is kept, the probe says {after.verdict.value}"
                found.append(f"{name} {row.name}: {overlay}: {change}")
            elif before != after:
                found.append(f"{name} {row.name}: {overlay}: {after.verdict.value} as kept, for other reasons")
        if replace(row, cells={}) != replace(rows[row.name], cells={}):
            found.append(f"{name} {row.name}: its date or its file is not as kept")
    return found


def _table(table: Table) -> dict[str, Any]:
    flips = [flip for column in table.columns for flip in matrix.flips(table, column.overlay)]
    data: dict[str, Any] = {
        "distribution": table.distribution,
        "asked": table.asked,
        "overlays": [_column(each) for each in table.columns],
        "flips": [
            {"overlay": each.overlay, "before": each.before.value, "after": each.after.value, "release": each.row.name}
            | {"date": each.row.date}
            for each in flips
        ],
        "releases": [_row(row) for row in table.rows],
    }
    return data | ({"trees": [_row(row) for row in table.trees]} if table.trees else {})


def _column(column: Column) -> dict[str, Any]:
    data = {"id": column.overlay, **_plain(column)}
    del data["overlay"]
    return data | {"targets": [target._asdict() for target in column.targets]}


def _row(row: Row) -> dict[str, Any]:
    data = _plain(row)
    cells, problem = data.pop("cells"), data.pop("problem")
    data["overlays"] = {name: _cell(cell) for name, cell in cells.items()}
    return data if problem is None else {**data, "problem": problem}


def _cell(cell: Cell) -> dict[str, Any]:
    parts = [
        _plain(part) | {"verdict": part.verdict.value, "evidence": [each._asdict() for each in part.evidence]}
        for part in cell.parts
    ]
    return {"verdict": cell.verdict.value, "parts": parts}


def _plain(record: Row | Column | PartFinding) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _read_table(data: Mapping[str, Any]) -> Table:
    return Table(
        distribution=data["distribution"],
        asked=data["asked"],
        columns=tuple(_read_column(**each) for each in data["overlays"]),
        rows=tuple(_read_row(**each) for each in data["releases"]),
        trees=tuple(_read_row(**each) for each in data.get("trees", ())),
    )


def _read_column(*, id: str, targets: Sequence[Mapping[str, Any]], **rest: Any) -> Column:
    return Column(overlay=id, targets=tuple(Target(**each) for each in targets), **rest)


def _read_row(*, overlays: Mapping[str, Mapping[str, Any]], **rest: Any) -> Row:
    return Row(cells={name: _read_cell(**each) for name, each in overlays.items()}, **rest)


def _read_cell(*, verdict: str, parts: Sequence[Mapping[str, Any]]) -> Cell:
    cell = Cell(parts=tuple(_read_part(**part) for part in parts))
    if cell.verdict.value != verdict:
        raise ValueError(f"the parts say {cell.verdict.value}, and the verdict is {verdict}")
    return cell


def _read_part(*, verdict: str, evidence: Sequence[Mapping[str, Any]], **rest: Any) -> PartFinding:
    return PartFinding(verdict=Verdict(verdict), evidence=tuple(Evidence(**each) for each in evidence), **rest)


def _answer(table: Table) -> IndexAnswer:
    releases = [
        release(row.name, [ArchiveFile(name=row.source, sha256=row.sha256 or "", uploaded=_uploaded(row))], row.yanked)
        for row in table.rows
    ]
    return IndexAnswer(distribution=table.distribution, asked=table.asked, releases=in_order(releases))


def _uploaded(row: Row) -> str | None:
    return row.date if row.dated == matrix.UPLOADED else None
