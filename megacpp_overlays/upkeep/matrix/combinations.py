"""Gates about combinations of two distributions: the distribution whose release decides, and the partner that is read with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from megacpp_overlays.errors import SourceError, UpkeepError
from megacpp_overlays.model import Erratum, Gate
from megacpp_overlays.source.file_trees import ArchiveTree
from megacpp_overlays.upkeep.matrix.archives import Archives
from megacpp_overlays.upkeep.matrix.releases import IndexAnswer, Release


class Partner(NamedTuple):
    """A release that is read together with every release of another distribution, for a gate about the combination."""

    version: str
    tree: ArchiveTree


def decisive(part: Erratum) -> str:
    """Return the distribution whose release decides the probe's verdict: that of the target, except for some gates."""
    return (part.decided_by if isinstance(part, Gate) else None) or part.target.distribution


def partner(part: Erratum) -> str | None:
    """Return the distribution that must be read together with a release: that of the target, where another one decides."""
    return None if decisive(part) == part.target.distribution else part.target.distribution


def partners(
    overlays: Sequence[Erratum], answer: Callable[[str], IndexAnswer], archives: Archives, stack: ExitStack
) -> dict[str, Partner]:
    """Open the newest release of each `partner` of overlays, by its distribution.

    Args:
        overlays: the overlays of one table.
        answer: returns the releases of a distribution.
        archives: the files of the releases.
        stack: closes the opened archives.

    Raises:
        UpkeepError: there is no such release, it is not on this machine, or it cannot be opened.
    """
    found: dict[str, Partner] = {}
    for name in dict.fromkeys(name for part in overlays if (name := partner(part)) is not None):
        release = newest(answer(name))
        path = archives.get(release.files[0]) if release.files else None
        if path is None:
            raise UpkeepError(
                f"{name} {release.version}, which releases of {decisive(overlays[0])} are read together with, is not in the "
                "cache; run once with a network"
            )
        try:
            found[name] = Partner(release.version, stack.enter_context(ArchiveTree(path, prefix="")))
        except SourceError as error:
            raise UpkeepError(str(error)) from error
    return found


def newest(answer: IndexAnswer) -> Release:
    """Return the release that installers take: the newest final one that was not withdrawn, else the newest one."""
    final = [each for each in answer.releases if each.is_final and each.yanked is None]
    return (final or answer.releases)[-1]
