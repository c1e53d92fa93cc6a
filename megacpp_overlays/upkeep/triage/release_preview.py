"""Preview of a move to other releases, from the kept matrix's rows of the installed release and of the new one.

It needs no lock, no environment and no file of the new release, and takes a second. Releases that are not in the matrix are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.model import Erratum, Verdict
from megacpp_overlays.upkeep.evidence import ProbedPart, ProbeReport
from megacpp_overlays.upkeep.locks import same_version
from megacpp_overlays.upkeep.matrix import matrix_file
from megacpp_overlays.upkeep.matrix.matrix import Row, Table
from megacpp_overlays.upkeep.triage.outcomes import UpgradeOutcome
from megacpp_overlays.upkeep.triage.preview import OverlayPreview, expect
from megacpp_overlays.upkeep.triage.triage import VersionChange

_ORDER = (
    UpgradeOutcome.CONFLICT,
    UpgradeOutcome.WITNESS,
    UpgradeOutcome.RETIRE,
    UpgradeOutcome.KEEP,
    UpgradeOutcome.ABSENT,
)
"""Order of outcomes in a preview: those that need a person first."""


def is_release(text: str) -> bool:
    """Return whether an argument names a release, `NAME==VERSION`, and not a lock."""
    return "==" in text


def moves(releases: Sequence[str], overlays: Sequence[Erratum]) -> tuple[VersionChange, ...]:
    """Return the version changes from the installed distributions to some releases.

    Args:
        releases: each `NAME==VERSION`.
        overlays: the declarations, in parts.

    Raises:
        UpkeepError: an argument is no release, of no target, not installed here, or the installed version; the message names it.
    """
    targets = {canonicalize_name(each.target.distribution) for each in overlays}
    found: list[VersionChange] = []
    for text in releases:
        name, version = _parsed(text)
        if name not in targets:
            raise UpkeepError(f"{text}: no overlay is about {name}; they are about {', '.join(sorted(targets))}")
        if name in {each.distribution for each in found}:
            raise UpkeepError(f"{text}: {name} is named twice")
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise UpkeepError(f"{text}: {name} is not installed here, so there is nothing to move from") from None
        if same_version(here, version):
            raise UpkeepError(f"{text}: this version is installed here already, so nothing changes")
        found.append(VersionChange(distribution=name, before=here, after=version, is_target=True))
    return tuple(found)


def preview(packs: Path, changes: Sequence[VersionChange], overlays: Sequence[Erratum]) -> tuple[OverlayPreview, ...]:
    """Preview the overlays of the changed distributions; overlays that need a person come first.

    Args:
        packs: the folder of `matrix.json`.
        changes: as `moves` returns them.
        overlays: the declarations, in parts; overlays that are not among them are left out.

    Raises:
        UpkeepError: the matrix cannot be read, or has no row of a release.
    """
    tables = {each.distribution: each for each in matrix_file.read(packs)}
    found: list[OverlayPreview] = []
    for change in changes:
        table = tables.get(change.distribution)
        before, after = (_row(table, change.distribution, version or "") for version in (change.before, change.after))
        for column in table.columns if table else ():
            parts = {each.target.module: each for each in overlays if each.id == column.overlay}
            if not parts:
                continue
            here, there = (_report(parts, row, change.distribution) for row in (before, after))
            expected, reason = expect(here, there)
            overlay = next(iter(parts.values()))
            if expected is UpgradeOutcome.KEEP and here.verdict is not Verdict.BROKEN:
                reason = f"{reason}: {overlay.breaks}"
            elif there.verdict is Verdict.ABSENT:  # known for that release, so it does not mean that code was moved
                expected, reason = UpgradeOutcome.ABSENT, there.evidence
            found.append(OverlayPreview(overlay=overlay, before=here, after=there, expected=expected, reason=reason))
    return tuple(sorted(found, key=lambda each: _ORDER.index(each.expected)))


def _parsed(text: str) -> tuple[str, str]:
    """Return the canonical name and the version of `NAME==VERSION`."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise UpkeepError(f"{text}: no release, which is NAME==VERSION: {error}") from None
    exact = [each.version for each in requirement.specifier]
    if len(exact) != 1 or "*" in exact[0]:
        raise UpkeepError(f"{text}: no release, which is NAME==VERSION with one version")
    return canonicalize_name(requirement.name), exact[0]


def _row(table: Table | None, distribution: str, version: str) -> Row:
    """Return the row of a release."""
    rows = table.rows if table else ()
    for row in rows:
        if row.cells and same_version(row.name, version):
            return row
    known = f"{rows[0].name} to {rows[-1].name}" if rows else "none"
    raise UpkeepError(
        f"{distribution}=={version}: the matrix of releases does not know it (of {distribution} it knows {known}); install it in an "
        "environment of its own, and run `megacpp-overlays audit --quick` there, then `witness`"
    )


def _report(parts: Mapping[str, Erratum], row: Row, distribution: str) -> ProbeReport:
    """Return the matrix's findings about an overlay in a release, in the form of a report of an environment."""
    overlay = next(iter(parts.values()))
    probed = []
    for each in row.cells[overlay.id].parts:
        part = parts.get(each.module, overlay)
        probed.append(
            ProbedPart(
                module=each.module,
                target=str(part.target),
                distribution=distribution,
                version=row.name,
                verdict=each.verdict,
                shape=each.shape,
                evidence=", ".join(one.seen for one in each.evidence),
                has_seams=part.answers(each.shape),
                gate=not part.installs,
                opt_in=part.off_by_default,
                left_alone=part.unsupported.get(each.shape or ""),
                can_be_proved=each.verdict is Verdict.UNRECOGNISED,
            )
        )
    return ProbeReport(overlay=overlay.id, parts=tuple(probed), due=False)
