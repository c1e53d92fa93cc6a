"""The gate of pack 18 knows which TileLang adds values of grouped sums more than once."""

from __future__ import annotations

from pathlib import Path

import pytest
from installed import Edited, tree_of
from probing import ask

from megacpp_overlays.feature_probes import tilelang_grouped_reduce as feature
from megacpp_overlays.feature_probes import tilelang_sums
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays.tilelang_grouped_reduce import OVERLAY
from megacpp_overlays.source.file_trees import DirectoryTree

pytestmark = pytest.mark.upstream


@pytest.mark.parametrize(
    ("lane", "verdict"),
    [
        ("spring-2026", Verdict.FIXED),
        ("mamba3-pinned", Verdict.FIXED),
        ("edge", Verdict.FIXED),
        ("newest", Verdict.ABSENT),
    ],
)
def test_the_verdict_on_what_is_locked(lane: str, verdict: Verdict) -> None:
    assert ask(feature.probe, tree_of(lane)).verdict is verdict


def test_a_release_whose_sums_are_wrong_is_known_by_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of 0.1.8 stands for one of those releases: none of them is in a lane."""
    monkeypatch.setattr(feature, "_WRONG", feature._REFUSING)
    monkeypatch.setattr(feature, "_REFUSING", set())

    found = ask(feature.probe, tree_of("mamba3-pinned"))

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
        ("mamba3-pinned", "src/op/reduce.cc", {"#include": f"// {tilelang_sums.CHECK}\n#include"}),
    ],
    ids=["edited", "in a comment"],
)
def test_a_text_with_the_words_of_the_check_that_nobody_read_looks_repaired(
    lane: str, file: str, edit: dict[str, str]
) -> None:
    found = ask(feature.probe, Edited(tree_of(lane), f"tilelang/{file}", edit))

    assert (found.verdict, found.looks_repaired) == (Verdict.UNRECOGNISED, True)


def test_the_check_without_its_words_is_not_recognised() -> None:
    tree = Edited(tree_of("edge"), "tilelang/src/backend/common/op/reduce.h", {"ReduceOp cannot lower": "cannot lower"})

    assert ask(feature.probe, tree).verdict is Verdict.UNRECOGNISED


def test_a_file_that_cannot_be_read_is_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "tilelang").mkdir()
    (tmp_path / "tilelang/__init__.py").touch()
    (tmp_path / "tilelang/src/op/reduce.cc").mkdir(parents=True)

    assert ask(feature.probe, DirectoryTree(tmp_path)).verdict is Verdict.UNRECOGNISED
