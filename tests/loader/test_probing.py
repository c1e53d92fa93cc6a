"""A probe that raises: the verdict is UNRECOGNISED, with the error as evidence."""

from __future__ import annotations

import pytest
from made_up import Upstream

from megacpp_overlays.errors import SourceError
from megacpp_overlays.loader.probing import examine
from megacpp_overlays.model import Evidence, Finding, Verdict
from megacpp_overlays.source.trees import InstalledTree, SourceTree


@pytest.mark.parametrize(
    ("error", "evidence"),
    [
        (SourceError("layers.py:3: cannot be parsed"), Evidence("layers.py:3: cannot be parsed")),
        (SourceError("is no plain class", file="layers.py", line=3), Evidence("is no plain class", "layers.py", 3)),
        (RecursionError("maximum"), Evidence("its code is nested too deeply for the probe to read it")),
        (KeyError("name"), Evidence("the probe could not read it: KeyError: 'name'")),
    ],
    ids=["source", "place in source", "too deep", "anything else"],
)
def test_an_error_of_a_probe_is_evidence(upstream: Upstream, error: Exception, evidence: Evidence) -> None:
    def trip(_: SourceTree) -> Finding:
        raise error

    finding = examine(upstream.overlay(probe=trip), InstalledTree())

    assert (finding.verdict, finding.shape) == (Verdict.UNRECOGNISED, None)
    assert finding.evidence == (evidence,)
