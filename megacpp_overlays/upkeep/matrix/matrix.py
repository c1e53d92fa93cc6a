"""The matrix: the findings of every probe for every release of its target, and the releases where the verdict changes.

Releases are read as published and trees as they are on disk. No upstream code is imported.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from types import MappingProxyType
from typing import NamedTuple

from megacpp_overlays.errors import SourceError, UpkeepError
from megacpp_overlays.loader import learned
from megacpp_overlays.model import Erratum, Evidence, Overlay, Target, Verdict
from megacpp_overlays.near_names import suggestion
from megacpp_overlays.repro import judge
from megacpp_overlays.source.file_trees import ArchiveTree, BesideTree, FileTree
from megacpp_overlays.source.trees import CachedTree
from megacpp_overlays.upkeep import ledger
from megacpp_overlays.upkeep.finding_cache import FindingCache, closure, text_sha256
from megacpp_overlays.upkeep.matrix.archives import Archives
from megacpp_overlays.upkeep.matrix.combinations import Partner, decisive, partner
from megacpp_overlays.upkeep.matrix.releases import IndexAnswer, Release

UPLOADED, BUILT, COMMITTED = "uploaded", "built", "committed"
"""Events that the date of a row can refer to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFinding:
    """The finding of the probe of one part of an overlay."""

    module: str
    verdict: Verdict
    shape: str | None
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The findings of one overlay's probes in one release."""

    parts: tuple[PartFinding, ...]

    @property
    def verdict(self) -> Verdict:
        """The verdict over all parts, combined as for a reproducer."""
        return judge.verdict_of(self.parts)

    @property
    def telling(self) -> tuple[PartFinding, ...]:
        """The parts to show: those whose verdict is not ABSENT, or all where every part is ABSENT."""
        return tuple(part for part in self.parts if part.verdict is not Verdict.ABSENT) or self.parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One release, or one tree."""

    name: str
    """The version of the release, or the name of the tree."""
    date: str | None
    """The date in UTC."""
    dated: str | None
    """`uploaded`, `built` or `committed`; None where there is no date."""
    source: str
    """The file that was read, or the commit."""
    sha256: str | None
    """SHA-256 of the file."""
    yanked: str | None
    """The reason why the release was withdrawn, possibly empty; None where it was not withdrawn."""
    cells: Mapping[str, Cell]
    """Cells by overlay; empty where nothing could be read."""
    problem: str | None = None
    """The reason why nothing could be read; None where the release or tree was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One overlay or gate."""

    overlay: str
    kind: str
    """`overlay` or `gate`."""
    beside: str | None
    """The partner release that every release was read with, such as `mamba-ssm 2.3.2.post1`; None where releases were read alone."""
    pack: int
    title: str
    breaks: str
    retire_when: str
    targets: tuple[Target, ...]
    left_alone: Mapping[str, str]
    """Broken shapes that the overlay does not repair, each with the reason; for a gate, each with the advice."""
    probes: Mapping[str, str]
    """SHA-256 of the source of each module that the probes consist of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One distribution."""

    distribution: str
    asked: str
    """The date of the index query, in UTC."""
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    """Releases, ordered by version."""
    trees: tuple[Row, ...] = ()


class Flip(NamedTuple):
    """A release whose verdict differs from that of the previous release, in order of version."""

    overlay: str
    before: Verdict
    after: Verdict
    row: Row


class Streak(NamedTuple):
    """Consecutive releases with identical findings."""

    first: Row
    last: Row
    cell: Cell


def choose(overlays: Sequence[Erratum], target: str | None) -> dict[str, list[Erratum]]:
    """Return the overlays and gates to probe, in parts, by the distribution whose release decides.

    Args:
        overlays: every declared overlay and gate.
        target: a distribution that an overlay or gate concerns, or the id of an overlay or gate; None for all.

    Raises:
        UpkeepError: the target is neither; the message lists the nearest names.
    """
    chosen: dict[str, list[Erratum]] = {}
    known: dict[str, None] = {}
    for part in overlays:
        names = (part.target.distribution, *part.companions, part.id)
        known |= dict.fromkeys(names)
        if target is None or target in names:
            chosen.setdefault(decisive(part), []).append(part)
    if target is not None and not chosen:
        raise UpkeepError(f"{target}: no overlay has this id, and none is about it; {suggestion(target, list(known))}")
    return chosen


def columns(overlays: Sequence[Erratum], beside: Mapping[str, Partner] = MappingProxyType({})) -> tuple[Column, ...]:
    """Return the columns for overlays in parts; see `table` for the partner releases."""
    return tuple(
        Column(
            overlay=of_it[0].id,
            kind=of_it[0].kind,
            beside=None if (name := partner(of_it[0])) is None else f"{name} {beside[name].version}",
            pack=of_it[0].pack,
            title=of_it[0].title,
            breaks=of_it[0].breaks,
            retire_when=of_it[0].retire_when,
            targets=tuple(part.target for part in of_it),
            left_alone={shape: why for part in of_it for shape, why in part.unsupported.items()},
            probes=dict(sorted(_sources({part.probe.__module__ for part in of_it}).items())),
        )
        for of_it in ledger.by_id(overlays).values()
    )


def probe(
    overlays: Sequence[Erratum],
    tree: FileTree,
    beside: Mapping[str, Partner] = MappingProxyType({}),
    findings: FindingCache | None = None,
    release: str | None = None,
) -> dict[str, Cell]:
    """Return the findings of every probe in a tree, by overlay; a probe that raises has recognised nothing.

    Args:
        overlays: overlays in parts.
        tree: the tree to read.
        beside: the partner releases that are added to the tree for overlays with a `partner`.
        findings: the cache of earlier findings.
        release: the version of the tree's release; learned verdicts on this release are applied.

    Raises:
        UpkeepError: the tree cannot be read.
    """
    cache = findings or FindingCache()
    names = dict.fromkeys(map(partner, overlays))
    trees = {name: CachedTree(tree if name is None else BesideTree(tree, beside[name].tree)) for name in names}
    found: dict[str, list[PartFinding]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old releases have escapes that newer Pythons warn about
        for overlay in overlays:
            finding = cache.derive(overlay, trees[partner(overlay)], unless=(UpkeepError,)).finding
            finding = finding if release is None else learned.in_release(overlay, release, finding)
            part = PartFinding(
                module=overlay.target.module,
                verdict=finding.verdict,
                shape=finding.shape,
                evidence=finding.evidence,
            )
            found.setdefault(overlay.id, []).append(part)
    return {name: Cell(parts=tuple(parts)) for name, parts in found.items()}


def _probe_whole(
    overlays: Sequence[Erratum],
    archive: ArchiveTree,
    partners: Mapping[str, Partner],
    findings: FindingCache,
    release: str,
) -> dict[str, Cell]:
    """Return the findings of every probe in an archive; see `probe`.

    Raises:
        UpkeepError: a file that a probe read is damaged; the probe may have taken the damage for upstream's code.
    """
    found = probe(overlays, archive, partners, findings, release)
    for each in (archive, *(each.tree for each in partners.values())):
        if each.damage is not None:
            raise UpkeepError(each.damage)
    return found


def packages(overlays: Sequence[Erratum]) -> tuple[str, ...]:
    """Return the top-level packages of the distributions whose releases decide about the overlays."""
    return tuple(
        dict.fromkeys(
            part.target.module.partition(".")[0] if partner(part) is None else decisive(part).replace("-", "_")
            for part in overlays
        )
    )


def release_row(
    release: Release,
    overlays: Sequence[Erratum],
    archives: Archives,
    beside: Mapping[str, Partner] = MappingProxyType({}),
) -> Row:
    """Return the row of a release; the row of an unreadable release has the reason in `problem`."""
    problem = "it has no wheel and no tar.gz with a SHA-256"
    row: Row | None = None
    for file in release.files:
        try:
            if (path := archives.get(file)) is None:
                problem = f"{file.name} is not in the cache; run once with a network"
                break
            with ArchiveTree(path, prefix="") as tree:
                has_source = any(tree.has_package(name) for name in packages(overlays))
                found = _probe_whole(overlays, tree, beside, archives.findings, release.version)
                row = _row(release, file.name, file.sha256, found, tree.newest)
        except (SourceError, UpkeepError) as error:
            problem = str(error)
            break
        if has_source:
            return row
    else:
        if row is not None:
            return row  # every file was read and none has the packages: the probes say ABSENT
    return Row(
        name=release.version,
        date=release.date,
        dated=UPLOADED if release.date else None,
        source=release.files[0].name if release.files else "",
        sha256=None,
        yanked=release.yanked,
        cells={},
        problem=problem,
    )


def is_left_alone(cell: Cell, column: Column) -> bool:
    """Return whether every broken shape of a cell is one that the overlay declares unrepaired; False for a gate."""
    broken = [part for part in cell.parts if part.verdict is Verdict.BROKEN]
    return column.kind == Overlay.kind and bool(broken) and all(part.shape in column.left_alone for part in broken)


def _row(release: Release, name: str, sha256: str, cells: Mapping[str, Cell], written: float | None) -> Row:
    date, dated = release.date, UPLOADED if release.date else None
    if date is None and written is not None:
        date, dated = datetime.fromtimestamp(written, timezone.utc).date().isoformat(), BUILT
    return Row(
        name=release.version, date=date, dated=dated, source=name, sha256=sha256, yanked=release.yanked, cells=cells
    )


def table(
    overlays: Sequence[Erratum],
    answer: IndexAnswer,
    archives: Archives,
    *,
    pre: bool,
    tell: Callable[[str], None],
    beside: Mapping[str, Partner] = MappingProxyType({}),
) -> Table:
    """Probe every release of one distribution.

    Args:
        overlays: the overlays of the distribution, in parts.
        answer: the index's list of releases.
        archives: the files of the releases.
        pre: whether to read pre-releases and development builds, too.
        tell: receives progress lines.
        beside: the partner releases that every release is read with, for gates with a `partner`.
    """
    wanted = [each for each in answer.read if pre or each.is_final]
    tell(f"{answer.distribution}: {len(wanted)} releases")
    rows = tuple(release_row(each, overlays, archives, beside) for each in wanted)
    heads = columns(overlays, beside)
    return Table(distribution=answer.distribution, asked=answer.asked, columns=heads, rows=rows)


def flips(table: Table, overlay: str) -> tuple[Flip, ...]:
    """Return the releases where the verdict about an overlay changes, in order of version."""
    rows = [row for row in table.rows if row.problem is None]
    return tuple(
        Flip(overlay, before.cells[overlay].verdict, after.cells[overlay].verdict, after)
        for before, after in itertools.pairwise(rows)
        if before.cells[overlay].verdict is not after.cells[overlay].verdict
    )


def runs(rows: Sequence[Row], overlay: str) -> tuple[Streak, ...]:
    """Return the findings about an overlay, with consecutive releases of identical findings merged."""
    found: list[Streak] = []
    for row in rows:
        if row.problem is not None:
            continue
        cell = row.cells[overlay]
        if found and found[-1].cell == cell:
            found[-1] = found[-1]._replace(last=row)
        else:
            found.append(Streak(row, row, cell))
    return tuple(found)


def _sources(names: set[str]) -> dict[str, str]:
    """Return the SHA-256 of the given modules and of the probe modules that they import."""
    written = [name for name in names if getattr(sys.modules.get(name), "__file__", None) is not None]
    found = {name for name in closure(written) if name in names or name.startswith("megacpp_overlays.feature_probes.")}
    return {name: text_sha256(name) for name in found}
