"""The probe of the MIMO backward: its evidence, and that nothing else leads to the function."""

from __future__ import annotations

from pathlib import Path

import pytest
from mamba3_release import unpack
from probing import ask

from megacpp_overlays.feature_probes import mamba3_mimo_gqa_backward as feature
from megacpp_overlays.model import Overlay, Verdict
from megacpp_overlays.overlays.mamba3_mimo_gqa_backward import PARTS
from megacpp_overlays.source.file_trees import DirectoryTree
from megacpp_overlays.upkeep.ledger import due


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> DirectoryTree:
    return DirectoryTree(unpack(tmp_path_factory.mktemp("release")))


@pytest.fixture(params=PARTS, ids=["plain", "varlen"])
def part(request: pytest.FixtureRequest) -> Overlay:
    found: Overlay = request.param
    return found


def text_of(tree: DirectoryTree, part: Overlay) -> str:
    source = tree.module(part.target.module)
    assert source is not None
    return source.text


# The release


def test_the_release_is_broken(release: DirectoryTree, part: Overlay) -> None:
    finding = ask(part.probe, release)

    assert (finding.verdict, finding.shape) == (Verdict.BROKEN, feature.ONE_OR_ALL)
    assert "sums gradients into one group or into all, else raises (mamba3_mimo_bwd" in finding.summary()
    assert due([part], release) == []


def test_the_evidence_is_where_it_raises(release: DirectoryTree, part: Overlay) -> None:
    seen, _ = ask(part.probe, release).evidence
    assert seen.line is not None

    assert "G value of {G}" in text_of(release, part).splitlines()[seen.line - 1]


@pytest.mark.parametrize("line", ["import {name}", "from {name} import *"])
def test_the_package_has_no_other_way_to_the_function(release: DirectoryTree, line: str) -> None:
    """Both names are bound by `from ... import` in one module each, which the loader leads to the seam."""
    root: Path = release.root
    for part in PARTS:
        assert not any(line.format(name=part.target.module) in path.read_text() for path in root.rglob("*.py"))
