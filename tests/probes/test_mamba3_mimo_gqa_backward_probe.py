"""The probe of the MIMO backward: the groups into which it sums gradients, from texts that were read and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from mamba3_release import unpack
from probing import ask

from megacpp_overlays.feature_probes import mamba3_mimo_gqa_backward as feature
from megacpp_overlays.model import Finding, Overlay, Verdict
from megacpp_overlays.overlays.mamba3_mimo_gqa_backward import PARTS
from megacpp_overlays.source.file_trees import DirectoryTree
from megacpp_overlays.source.trees import ModuleSource
from megacpp_overlays.upkeep.ledger import due


class Texts:
    """A tree of nothing but these modules, by full name."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def module(self, name: str) -> ModuleSource | None:
        return ModuleSource(name, f"{name}.py", self._texts[name]) if name in self._texts else None


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


def after(tree: DirectoryTree, part: Overlay, old: str, new: str) -> Finding:
    """Return the finding after the first place with a text was changed."""
    text = text_of(tree, part)
    assert old in text
    return ask(part.probe, Texts({part.target.module: text.replace(old, new, 1)}))


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


def test_comments_and_docstrings_may_change(release: DirectoryTree, part: Overlay) -> None:
    assert after(release, part, "Copyright (c) 2026", "# Written in 2026").verdict is Verdict.BROKEN
    assert after(release, part, "import torch\n", "import torch  # first\n").verdict is Verdict.BROKEN


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("i_h_qk = i_h // (H // G)", "i_h_qk = i_h % G"),
        ("DQ: T.Tensor([B, S*R, H, N], dtype)", "DQ: T.Tensor([B, S*R, G, N], dtype)"),
        ("elif G == H:", "elif G != 1:"),
        ("TL_DISABLE_TMA_LOWER: True", "TL_DISABLE_TMA_LOWER: False"),
        ("bb_num_stages=0,\n", "bb_num_stages=0,\n        out_norm=None,\n"),
        (".sum(dim=(0, 1)).permute((1, 0, 2))", ".sum(dim=(0, 1))"),
    ],
    ids=["other groups", "grouped gradients", "other cases", "other compilation", "another argument", "other biases"],
)
def test_nothing_in_it_may_change(release: DirectoryTree, part: Overlay, old: str, new: str) -> None:
    old = old if old in text_of(release, part) else old.replace("S*R", "S * R")

    assert after(release, part, old, new).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    "tail",
    [
        "{symbol} = faster({symbol})",
        "mamba_mimo_bwd_bwd = faster(mamba_mimo_bwd_bwd)",
        "from elsewhere import {symbol}",
        "def {symbol}(*args): ...",
        "print('loaded')",
    ],
)
def test_nothing_may_be_added_to_it(release: DirectoryTree, part: Overlay, tail: str) -> None:
    text = f"{text_of(release, part)}\n\n{tail.format(symbol=part.target.symbol)}\n"

    assert ask(part.probe, Texts({part.target.module: text})).verdict is Verdict.UNRECOGNISED


def test_before_mimo_there_is_nothing_to_repair(part: Overlay) -> None:
    assert ask(part.probe, Texts({})).verdict is Verdict.ABSENT


def test_a_backward_without_the_function_is_not_called_absent(part: Overlay) -> None:
    finding = ask(part.probe, Texts({part.target.module: "def other(): ..."}))

    assert finding.verdict is Verdict.UNRECOGNISED


def test_text_that_does_not_parse_is_not_recognised(part: Overlay) -> None:
    assert ask(part.probe, Texts({part.target.module: "def ("})).verdict is Verdict.UNRECOGNISED


def test_given_trees_of_mamba_are_recognised(part: Overlay, upstream_trees: list[Path]) -> None:
    """Main, for one, is FIXED since 2026-06-08; run with --upstream-tree and a checkout of state-spaces/mamba."""
    for folder in upstream_trees:
        finding = ask(part.probe, DirectoryTree(folder))
        assert finding.verdict is not Verdict.UNRECOGNISED, finding.summary()


@pytest.mark.parametrize("line", ["import {name}", "from {name} import *"])
def test_the_package_has_no_other_way_to_the_function(release: DirectoryTree, line: str) -> None:
    """Both names are bound by `from ... import` in one module each, which the loader leads to the seam."""
    root: Path = release.root
    for part in PARTS:
        assert not any(line.format(name=part.target.module) in path.read_text() for path in root.rglob("*.py"))
