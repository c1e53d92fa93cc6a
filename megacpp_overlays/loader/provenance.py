"""Provenance of verdicts: a published release, a reproducer that ran on this code, or the text of the code alone.

Only reports need it: the first call for a distribution hashes its files, which takes 30 ms for the largest.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence

from megacpp_overlays.model import Proof, Record, Verdict
from megacpp_overlays.source.published import has_releases_of, release_of
from megacpp_overlays.source.trees import InstalledTree


class Provenance(enum.Enum):
    """The strongest evidence for a verdict."""

    RELEASE = "release"
    """Every Python file of the package is that of a published release with a known verdict."""
    HERE = "here"
    """The reproducer ran on this code, in this environment."""
    READ = "read"
    """A probe recognised the definitions that it read; the rest of the tree is no release that this package knows."""


def provenance(record: Record) -> Provenance | None:
    """Return the provenance of the verdict of a decision; None without a verdict, or without installed code."""
    finding = record.finding
    if finding is None or finding.verdict is Verdict.UNRECOGNISED or record.version is None:
        return None
    if finding.proof is Proof.WITNESSED:
        return Provenance.HERE
    if finding.proof is Proof.LEARNED:
        return Provenance.RELEASE
    try:
        release = release_of(record.overlay.target, InstalledTree())
    except OSError:  # a file of the package cannot be read
        release = None
    return Provenance.READ if release is None else Provenance.RELEASE


def of_note(record: Record) -> Provenance | None:
    """Return the provenance of a verdict, or None for a verdict by reading in a distribution without known releases."""
    found = provenance(record)
    is_known = found is not Provenance.READ or has_releases_of(record.overlay.target.distribution)
    return found if is_known else None


def counted(records: Sequence[Record]) -> str:
    """Return the number of verdicts by provenance, as by `of_note`: `proved by: release 40, here 1`; empty for none."""
    found = Counter(found for record in records if (found := of_note(record)) is not None)
    return (
        f"proved by: {', '.join(f'{each.value} {found[each]}' for each in Provenance if found[each])}" if found else ""
    )
