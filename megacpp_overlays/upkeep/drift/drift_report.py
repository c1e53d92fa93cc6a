"""What `drift` found, as text for people and as data for machines."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megacpp_overlays.loader.rendering import aligned
from megacpp_overlays.upkeep.drift.accounts import Accounted, Entry, State
from megacpp_overlays.upkeep.drift.drift import Report, Row
from megacpp_overlays.upkeep.drift.records import Kind
from megacpp_overlays.upkeep.drift.running import Replaced, Running

RETIRE = "the file is as published: upstream absorbed the change, or it was never applied here; retire the entry"

_COLUMNS = ("distribution", "version", "compared with", "files", "differ", "state")
_BLOCKS = 10
"""How many entries to paste are printed; with more, reinstalling is the answer. The JSON has every hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Everything that one run found."""

    report: Report
    running: Running | None
    """None where no module was asked for."""

    @property
    def foreign(self) -> tuple[Replaced, ...]:
        """What somebody else replaced in this process."""
        return tuple(each for each in self.running.replaced if each.overlay is None) if self.running else ()

    @property
    def clean(self) -> bool:
        """Whether everything that was looked at is as published, or accounted for."""
        in_process = self.running is None or not (self.foreign or self.running.unchecked)
        return self.report.clean and in_process

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        running = self.running
        return {
            "clean": self.clean,
            "quick": self.report.quick,
            "distributions": [_row_dict(row) for row in self.report.rows],
            "not_installed": list(self.report.absent),
            "stale": [{"pack": each.pack, **dataclasses.asdict(each.diff)} for each in self.report.stale],
            "running": None
            if running is None
            else {
                "modules": running.modules,
                "replaced": [dataclasses.asdict(each) for each in running.replaced],
                "unchecked": list(running.unchecked),
            },
        }

    def __str__(self) -> str:
        parts = [
            aligned(_COLUMNS, [_cells(row) for row in self.report.rows]),
            _absent(self.report.absent),
            list(_files(self.report, State.UNTRACKED)),
            list(_files(self.report, State.TRACKED)),
            list(_unchecked(self.report.rows)),
            list(_stale(self.report.stale)),
            list(_process(self.running, self.foreign)) if self.running else [],
            list(self._verdict()),
        ]
        return "\n\n".join("\n".join(part) for part in parts if part)

    def _verdict(self) -> Iterator[str]:
        if self.report.quick:
            yield "quick: only sizes were compared; a change that keeps the size goes unseen"
        yield from _blocks(self.report.untracked)
        steps = list(self._steps())
        yield from (f"next: {step}" for step in steps)
        if self.clean:
            differs = any(row.state is State.TRACKED for row in self.report.rows)
            yield "no drift" + ("; packs account for what differs" if differs else "")

    def _steps(self) -> Iterator[str]:
        for row in self.report.rows:
            if row.state is State.UNTRACKED and row.restore:
                added = any(each.kind is Kind.ADDED for each in row.differences) and "stash" not in row.restore
                first = "delete the added files, then " if added else ""  # no installer removes what no RECORD names
                yield (
                    f"{row.distribution}: keep the change in a pack with the entry above, or undo it: "
                    f"{first}{row.restore}"
                )
            elif row.state is State.UNCHECKED and row.restore:
                yield f"{row.distribution}: make it checkable: {row.restore}"
        if self.report.required and self.report.absent:
            yield f"install what was asked for, or put its checkout on PYTHONPATH: {', '.join(self.report.absent)}"
        if self.foreign:
            yield "make an overlay of what was replaced, or take it out of what replaces it"
        if self.report.stale:
            yield "retire the stale entries from their packs"


def _row_dict(row: Row) -> dict[str, Any]:
    differences = [
        {**dataclasses.asdict(each), "kind": each.kind.value, "state": each.state.value} for each in row.differences
    ]
    return {**dataclasses.asdict(row), "differences": differences, "state": row.state.value}


def _cells(row: Row) -> tuple[str, ...]:
    counts = Counter(each.kind for each in row.differences)
    differ = ", ".join(f"{counts[kind]} {kind.value}" for kind in Kind if counts[kind]) or "-"
    return row.distribution, row.version or "-", row.where, str(row.checked), differ, row.state.value


def _absent(names: Sequence[str]) -> list[str]:
    return [f"not installed: {', '.join(names)}"] if names else []


def _files(report: Report, state: State) -> Iterator[str]:
    found = [each for row in report.rows for each in row.differences if each.state is state]
    if found:
        yield f"{state.value}:"
    for each in found:
        said = f"  by {each.pack}" if each.pack else f"  {each.note}" if each.note else ""
        yield f"  {each.distribution}: {each.file} {each.kind.value}{said}"


def _unchecked(rows: Sequence[Row]) -> Iterator[str]:
    found = [f"  {row.distribution}: {why}" for row in rows for why in row.unchecked]
    yield from (f"{State.UNCHECKED.value}:", *found) if found else ()


def _stale(entries: Sequence[Entry]) -> Iterator[str]:
    yield from (f"stale: {each.pack}: {each.diff.distribution}: {each.diff.file}: {RETIRE}" for each in entries)


def _process(running: Running, foreign: Sequence[Replaced]) -> Iterator[str]:
    ours = [each for each in running.replaced if each.overlay is not None]
    yield (
        f"this process: {running.modules} modules compared with the packages that own them; "
        f"{len(foreign)} names lead to code of somebody else, {len(ours)} to an overlay's"
    )
    yield from (f"  untracked: {each.module}.{each.symbol} is now {each.by}" for each in foreign)
    yield from (f"  tracked: {each.module}.{each.symbol} by overlay {each.overlay}" for each in ours)
    yield from (f"  {State.UNCHECKED.value}: {why}" for why in running.unchecked)


def _blocks(untracked: Sequence[Accounted]) -> Iterator[str]:
    blocks = [block for each in untracked if (block := each.block)]
    if blocks:
        yield "entries for the pack.toml of the pack that explains the change:"
        yield from (f"\n{block}" for block in blocks[:_BLOCKS])
        yield f"\n... and {len(blocks) - _BLOCKS} more; --json has every hash\n" if len(blocks) > _BLOCKS else ""
