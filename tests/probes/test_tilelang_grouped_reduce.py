"""The gate of pack 18 recognises the TileLang releases that add values of grouped sums more than once."""

from __future__ import annotations

from pathlib import Path

import pytest
from edited_code import archive
from installed import Edited, tree_of
from probing import ask

from megacpp_overlays.feature_probes import tilelang_grouped_reduce as feature
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays.tilelang_grouped_reduce import OVERLAY
from megacpp_overlays.source.file_trees import DirectoryTree

pytestmark = pytest.mark.upstream

CHECK = "ReduceOp cannot lower a layout where a source index depends on a"
"""The error of 0.1.13 and newer when they refuse a sum."""


@pytest.mark.parametrize(
    ("lane", "verdict"),
    [
        ("spring-2026", Verdict.FIXED),
        ("mamba3-pinned", Verdict.FIXED),
        ("edge", Verdict.FIXED),
        ("newest", Verdict.ABSENT),
    ],
)
def test_the_verdict_on_the_release_of_each_lane(lane: str, verdict: Verdict) -> None:
    assert ask(feature.probe, tree_of(lane)).verdict is verdict


@pytest.mark.parametrize("version", ["0.1.9", "0.1.10", "0.1.11", "0.1.12"])
def test_a_release_whose_sums_are_wrong_is_known_by_its_text(version: str) -> None:
    """None of them is in a lane."""
    found = ask(feature.probe, archive(f"tilelang-{version}-"))

    assert found.shape == feature.ADDED_TOO_OFTEN
    assert set(OVERLAY.unsupported) == {feature.ADDED_TOO_OFTEN}


@pytest.mark.parametrize("edit", [None, {"AllReduce": "SomeReduce"}])
def test_other_text_is_not_recognised(edit: dict[str, str] | None) -> None:
    tree = Edited(tree_of("mamba3-pinned"), "tilelang/src/op/reduce.cc", edit)

    assert ask(feature.probe, tree).verdict is Verdict.UNRECOGNISED
    assert ask(OVERLAY.probe, tree).verdict is not Verdict.FIXED
    assert ask(OVERLAY.probe, tree_of("edge")).verdict is Verdict.FIXED


@pytest.mark.parametrize(
    ("lane", "file", "edit"),
    [
        ("edge", "src/backend/common/op/reduce.h", {"#include": "// edited\n#include"}),
        ("mamba3-pinned", "src/op/reduce.cc", {"#include": f"// {CHECK}\n#include"}),
    ],
    ids=["edited", "in a comment"],
)
def test_an_edited_text_with_the_words_of_the_check_is_not_recognised(
    lane: str, file: str, edit: dict[str, str]
) -> None:
    found = ask(feature.probe, Edited(tree_of(lane), f"tilelang/{file}", edit))

    assert found.verdict is Verdict.UNRECOGNISED


def test_the_check_without_its_words_is_not_recognised() -> None:
    tree = Edited(tree_of("edge"), "tilelang/src/backend/common/op/reduce.h", {"ReduceOp cannot lower": "cannot lower"})

    assert ask(feature.probe, tree).verdict is Verdict.UNRECOGNISED


def test_a_file_that_cannot_be_read_is_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "tilelang").mkdir()
    (tmp_path / "tilelang/__init__.py").touch()
    (tmp_path / "tilelang/language.py").touch()
    (tmp_path / "tilelang/src/op/reduce.cc").mkdir(parents=True)

    assert ask(feature.probe, DirectoryTree(tmp_path)).verdict is Verdict.UNRECOGNISED
