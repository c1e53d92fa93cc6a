"""Learned verdicts: results of the reproducers on releases that no probe recognises, shipped with this package.

`megacpp-overlays learn` runs reproducers on a release and writes the verdict of each part that it tested into `learned.json`.
A verdict is valid if the installed package is that release byte for byte (see `source.published`), as long as probe, seams,
reproducer and neighbour cases are unchanged. A part that was tested without a verdict is `unproved` in that release, also if its
repair was read. A part that is broken and that no seams repair is a conflict. A kept witness of the user has precedence over a
learned verdict.
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
    """Return the verdict that was learned for the installed release, or the finding of the probe if there is none.

    Args:
        erratum: the declaration.
        found: the finding of its probe, which is UNRECOGNISED.
        tree: an `InstalledTree`.
    """
    if erratum.target.distribution not in _kept():
        return found
    try:
        release = published.release_of(erratum.target, tree)
    except OSError:  # with an unreadable file the package cannot be identified as a release
        return found
    return found if release is None else in_release(erratum, release, found)


def in_release(erratum: Erratum, release: str, found: Finding) -> Finding:
    """Return the verdict that was learned for a part in a release, or the finding if there is none."""
    data = _kept().get(erratum.target.distribution, {}).get(release, {}).get(known.name_of(erratum))
    if data is None or data["verdict"] is None or found.verdict is not Verdict.UNRECOGNISED:
        return found
    if data["code"] != code_of(erratum, data["shape"]):
        stale = Evidence(f"learned on {data['date']} in {release}, with another probe, seam or reproducer")
        return replace(found, evidence=(*found.evidence, stale))
    seen = Evidence(f"learned on {data['date']} in {release}: {data['seen']}")
    return witnesses.of_verdict(erratum, found, Verdict(data["verdict"]), data["shape"], seen, Proof.LEARNED)


def is_doubted(erratum: Erratum, release: str) -> bool:
    """Return whether reproducers ran for a part in a release and gave no verdict, or showed a defect that no seam repairs."""
    data = _kept().get(erratum.target.distribution, {}).get(release, {}).get(known.name_of(erratum))
    return data is not None and (data["verdict"] is None or data["shape"] == NOT_REPAIRED)


@functools.cache
def code_of(erratum: Erratum, shape: str | None) -> str:
    """Return a digest of the code that a verdict depends on, 16 hexadecimal digits: probe, seams if there is a shape, reproducer.

    Comments, docstrings and the descriptive texts of a declaration do not count.
    """
    code = witnesses.meaning(erratum, with_seams=shape is not None)
    reproducers = sorted(witnesses.PACKS.glob(f"{erratum.pack:02}-*/reproduce.py"))
    cases = [[hashlib.sha256(each.read_bytes()).hexdigest(), witnesses.beside(each)] for each in reproducers]
    return hashlib.sha256(json.dumps([sorted(code.items()), cases], sort_keys=True).encode()).hexdigest()[:16]


def read() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Return all learned verdicts, by distribution, release and part."""
    found: dict[str, dict[str, dict[str, dict[str, Any]]]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


@functools.cache
def _kept() -> Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]:
    """Return the learned verdicts; empty if the file cannot be read."""
    try:
        return read()
    except (OSError, ValueError):
        return {}
