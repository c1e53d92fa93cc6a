"""Preview of a move to other releases: what the kept matrix says of the installed one and of the one to move to.

It needs no lock, no environment and no file of the new release, and takes a second; releases that the matrix does not know are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.model import Erratum, Verdict
from megacpp_overlays.upkeep.evidence import ProbedPart, ProbeReport
from megacpp_overlays.upkeep.locks import same_version
from megacpp_overlays.upkeep.triage.preview import Expected, OverlayPreview, expect
from megacpp_overlays.upkeep.triage.triage import VersionChange

_ORDER = (Expected.CONFLICT, Expected.WITNESS, Expected.RETIRE, Expected.KEEP, Expected.ABSENT)
"""What needs a person comes first."""


def is_release(text: str) -> bool:
    """Return whether an argument names a release, `NAME==VERSION`, and not a lock."""
    return "==" in text


def moves(releases: Sequence[str], overlays: Sequence[Erratum]) -> tuple[VersionChange, ...]:
    """Return what changes from what is installed here to some releases.

    Args:
        releases: each `NAME==VERSION`.
        overlays: the declarations, in parts.

    Raises:
        UpkeepError: one is no release, of no target, not installed here or what is installed here; the text names it.
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
            raise UpkeepError(f"{text}: that is what is installed here, so nothing changes")
        found.append(VersionChange(distribution=name, before=here, after=version, is_target=True))
    return tuple(found)


def preview(matrix: Path, changes: Sequence[VersionChange], overlays: Sequence[Erratum]) -> tuple[OverlayPreview, ...]:
    """Preview the overlays of what changes, those first that need a person.

    Args:
        matrix: `matrix.json`.
        changes: as `moves` returns them.
        overlays: the declarations, in parts; others than these are left out.

    Raises:
        UpkeepError: there is no matrix, or it does not know a release.
    """
    if not matrix.is_file():
        raise UpkeepError(f"there is no {matrix}: run `make matrix` in a checkout")
    known = {each["distribution"]: each for each in json.loads(matrix.read_text())["distributions"]}
    found: list[OverlayPreview] = []
    for change in changes:
        entry = known.get(change.distribution, {"releases": (), "overlays": ()})
        before, after = (
            _answers(entry, change.distribution, version or "") for version in (change.before, change.after)
        )
        for name in (each["id"] for each in entry["overlays"]):
            parts = {each.target.module: each for each in overlays if each.id == name}
            if not parts:
                continue
            here = _report(parts, before[name], change.distribution, change.before)
            there = _report(parts, after[name], change.distribution, change.after)
            expected, reason = expect(here, there)
            overlay = next(iter(parts.values()))
            if expected is Expected.KEEP and here.verdict is not Verdict.BROKEN:
                reason = f"{reason}: {overlay.breaks}"
            elif there.verdict is Verdict.ABSENT:  # which is known of that release: no seam has lost its place
                expected, reason = Expected.ABSENT, there.evidence
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


def _answers(entry: Mapping[str, Any], distribution: str, version: str) -> Mapping[str, Any]:
    """Return what the matrix says of a release, by overlay."""
    for release in entry["releases"]:
        if same_version(release["name"], version) and release.get("overlays"):
            answers: Mapping[str, Any] = release["overlays"]
            return answers
    names = [each["name"] for each in entry["releases"]]
    known = f"{names[0]} to {names[-1]}" if names else "none"
    raise UpkeepError(
        f"{distribution}=={version}: the matrix of releases does not know it (of {distribution} it knows {known}); install it in an "
        "environment of its own, and run `megacpp-overlays audit --quick` there, then `witness`"
    )


def _report(
    parts: Mapping[str, Erratum], answer: Mapping[str, Any], distribution: str, version: str | None
) -> ProbeReport:
    """Return an answer of the matrix as the report of an environment."""
    overlay = next(iter(parts.values()))
    probed = []
    for each in answer["parts"]:
        part = parts.get(each["module"], overlay)
        verdict = Verdict(each["verdict"])
        probed.append(
            ProbedPart(
                module=each["module"],
                target=str(part.target),
                distribution=distribution,
                version=version,
                verdict=verdict,
                shape=each["shape"],
                evidence=", ".join(one["seen"] for one in each["evidence"]),
                has_seams=part.answers(each["shape"]),
                gate=not part.installs,
                opt_in=part.off_by_default,
                left_alone=part.unsupported.get(each["shape"] or ""),
                can_be_proved=verdict is Verdict.UNRECOGNISED,
            )
        )
    return ProbeReport(overlay=overlay.id, parts=tuple(probed), due=False)
