"""Learned verdicts: what reproducers showed on releases that no probe recognises, shipped with this package.

`megacpp-overlays learn` runs reproducers on a release and writes the verdict of each part that it asked about into `learned.json`.
A verdict counts where the installed package is that release byte for byte (see `source.published`), as long as probe, seams, reproducer
and neighbour cases are what they were then. A part that was asked about and earned no verdict is `unproved` there, whatever was read; one
that is broken and that no seams repair is a conflict.
What a user's own `witness` says comes first.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megacpp_overlays.frozen import replace
from megacpp_overlays.loader import known, witnesses
from megacpp_overlays.loader.decide import NOT_REPAIRED
from megacpp_overlays.model import Erratum, Evidence, Finding, Proof, Verdict
from megacpp_overlays.source import published
from megacpp_overlays.source.trees import SourceTree

FILE = Path(__file__).with_name("learned.json")


def finding(erratum: Erratum, found: Finding, tree: SourceTree) -> Finding:
    """Return the verdict that was learned of what is installed, or the finding where none was.

    Args:
        erratum: the declaration.
        found: what its probe says, which is UNRECOGNISED.
        tree: an `InstalledTree`.
    """
    if erratum.target.distribution not in _kept():
        return found
    try:
        release = published.release_of(erratum.target, tree)
    except OSError:  # a file of the package cannot be read, so that it is no release
        return found
    return found if release is None else in_release(erratum, release, found)


def in_release(erratum: Erratum, release: str, found: Finding) -> Finding:
    """Return the verdict that was learned of a part in a release, or the finding where none was."""
    data = _kept().get(erratum.target.distribution, {}).get(release, {}).get(known.name_of(erratum))
    if data is None or data["verdict"] is None or found.verdict is not Verdict.UNRECOGNISED:
        return found
    if data["code"] != code_of(erratum, data["shape"]):
        stale = Evidence(f"learned on {data['date']} in {release}, with another probe, seam or reproducer")
        return replace(found, evidence=(*found.evidence, stale))
    seen = Evidence(f"learned on {data['date']} in {release}: {data['seen']}")
    return witnesses.of_verdict(erratum, found, Verdict(data["verdict"]), data["shape"], seen, Proof.LEARNED)


def is_doubted(erratum: Erratum, release: str) -> bool:
    """Return whether reproducers were asked about a part in a release and gave no verdict that holds, or show the defect."""
    data = _kept().get(erratum.target.distribution, {}).get(release, {}).get(known.name_of(erratum))
    return data is not None and (data["verdict"] is None or data["shape"] == NOT_REPAIRED)


@functools.cache
def code_of(erratum: Erratum, shape: str | None) -> str:
    """Return 16 hexadecimal digits for the code that a verdict depends on: probe, seams where there is a shape, and reproducer.

    Comments, docstrings and what a declaration says to people do not count.
    """
    code = witnesses.meaning(erratum, with_seams=shape is not None)
    reproducers = sorted(witnesses.PACKS.glob(f"{erratum.pack:02}-*/reproduce.py"))
    cases = [[hashlib.sha256(each.read_bytes()).hexdigest(), witnesses.beside(each)] for each in reproducers]
    return hashlib.sha256(json.dumps([sorted(code.items()), cases], sort_keys=True).encode()).hexdigest()[:16]


def read() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Return all that is kept, by distribution, release and part."""
    found: dict[str, dict[str, dict[str, dict[str, Any]]]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


@functools.cache
def _kept() -> Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]:
    """Return what is kept; nothing where it cannot be read."""
    try:
        return read()
    except (OSError, ValueError):
        return {}
