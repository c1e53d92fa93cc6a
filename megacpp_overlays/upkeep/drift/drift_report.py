"""The report of `drift`, as text for people and as data for machines."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megacpp_overlays import terminal_text
from megacpp_overlays.loader.rendering import aligned
from megacpp_overlays.processes.startup_file import StartupFile
from megacpp_overlays.upkeep.drift.drift import DistributionDrift, DriftReport, DriftState
from megacpp_overlays.upkeep.drift.records import Kind
from megacpp_overlays.upkeep.drift.substitutions import ProcessDrift, Substitution

_COLUMNS = ("distribution", "version", "compared with", "files", "differ", "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftOutcome:
    """The complete result of one run."""

    report: DriftReport
    process: ProcessDrift | None
    """The comparison of this process; None where no module was requested."""
    startup: tuple[StartupFile, ...] = ()
    """The files that arm every Python of this environment, see `megacpp-overlays enable`; no RECORD names them."""

    @property
    def foreign(self) -> tuple[Substitution, ...]:
        """The replacements by third-party code in this process."""
        return tuple(each for each in self.process.replaced if each.overlay is None) if self.process else ()

    @property
    def clean(self) -> bool:
        """Whether everything that was examined is as published, or of this package."""
        in_process = self.process is None or not (self.foreign or self.process.unchecked)
        return self.report.clean and in_process and all(each.is_ours for each in self.startup)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        process = self.process
        return {
            "clean": self.clean,
            "quick": self.report.quick,
            "distributions": [_row_dict(row) for row in self.report.rows],
            "not_installed": list(self.report.absent),
            "startup_files": [
                {"file": str(each.path), "package": each.package, "state": _startup_state(each).value}
                for each in self.startup
            ],
            "running": None
            if process is None
            else {
                "modules": process.modules,
                "replaced": [dataclasses.asdict(each) for each in process.replaced],
                "unchecked": list(process.unchecked),
            },
        }

    def __str__(self) -> str:
        parts = [
            aligned(_COLUMNS, [_cells(row) for row in self.report.rows]),
            _absent(self.report.absent),
            list(_files(self.report.rows)),
            list(_unchecked(self.report.rows)),
            list(_startup(self.startup)),
            list(_process(self.process, self.foreign)) if self.process else [],
        ]
        shown = [[terminal_text.one_line(line) for line in part] for part in parts]
        shown.append(list(self._verdict()))
        return "\n\n".join("\n".join(part) for part in shown if part)

    def _verdict(self) -> Iterator[str]:
        if self.report.quick:
            yield "quick: only sizes were compared; a change that keeps the size goes unseen"
        steps = list(self._steps())
        yield from (terminal_text.one_line(f"next: {step}") for step in steps)
        if self.clean:
            yield "no drift"

    def _steps(self) -> Iterator[str]:
        for row in self.report.rows:
            if row.state is DriftState.UNTRACKED and row.restore:
                added = any(each.kind is Kind.ADDED for each in row.differences) and "stash" not in row.restore
                # no installer removes files that no RECORD names
                first = "delete the added files, then " if added else ""
                yield f"{row.distribution}: make an overlay of the change, or undo it: {first}{row.restore}"
            elif row.state is DriftState.UNCHECKED and row.restore:
                yield f"{row.distribution}: make it checkable: {row.restore}"
        if self.report.required and self.report.absent:
            yield f"install these distributions, or put their checkouts on PYTHONPATH: {', '.join(self.report.absent)}"
        if self.foreign:
            yield "make an overlay of the replacement, or remove the replacement from the code that installs it"
        if not all(each.is_ours for each in self.startup):
            yield "write the start-up file anew with `megacpp-overlays enable`, or remove it with `megacpp-overlays disable`"


def _row_dict(row: DistributionDrift) -> dict[str, Any]:
    differences = [{"file": each.file, "kind": each.kind.value, "sha256": each.sha256} for each in row.differences]
    return {**dataclasses.asdict(row), "differences": differences, "state": row.state.value}


def _cells(row: DistributionDrift) -> tuple[str, ...]:
    counts = Counter(each.kind for each in row.differences)
    differ = ", ".join(f"{counts[kind]} {kind.value}" for kind in Kind if counts[kind]) or "-"
    return row.distribution, row.version or "-", row.where, str(row.checked), differ, row.state.value


def _absent(names: Sequence[str]) -> list[str]:
    return [f"not installed: {', '.join(names)}"] if names else []


def _files(rows: Sequence[DistributionDrift]) -> Iterator[str]:
    found = [f"  {row.distribution}: {each.file} {each.kind.value}" for row in rows for each in row.differences]
    yield from (f"{DriftState.UNTRACKED.value}:", *found) if found else ()


def _unchecked(rows: Sequence[DistributionDrift]) -> Iterator[str]:
    found = [f"  {row.distribution}: {why}" for row in rows for why in row.unchecked]
    yield from (f"{DriftState.UNCHECKED.value}:", *found) if found else ()


def _startup_state(file: StartupFile) -> DriftState:
    return DriftState.TRACKED if file.is_ours else DriftState.UNTRACKED


def _startup(found: Sequence[StartupFile]) -> Iterator[str]:
    for each in found:
        how = (
            "as `megacpp-overlays enable` wrote it"
            if each.is_ours
            else "edited, or of another copy of megacpp_overlays"
        )
        yield f"start-up file: {_startup_state(each).value}: {each.path} arms every Python with {each.package}; {how}"


def _process(process: ProcessDrift, foreign: Sequence[Substitution]) -> Iterator[str]:
    ours = [each for each in process.replaced if each.overlay is not None]
    yield (
        f"this process: {process.modules} modules compared with the packages that own them; "
        f"{len(foreign)} names lead to third-party code, {len(ours)} to an overlay's"
    )
    yield from (f"  untracked: {each.module}.{each.symbol} is now {each.by}" for each in foreign)
    yield from (f"  tracked: {each.module}.{each.symbol} by overlay {each.overlay}" for each in ours)
    yield from (f"  {DriftState.UNCHECKED.value}: {why}" for why in process.unchecked)
