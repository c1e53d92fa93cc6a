"""The gate of pack 13, on the C++ that TileLang ships, as released and edited."""

from __future__ import annotations

from pathlib import Path

import pytest
from installed import Edited, tree_of
from probing import ask

from megacpp_overlays.feature_probes.tilelang_zero_extent_iterator import EQUALITY_ONLY, probe
from megacpp_overlays.model import Verdict
from megacpp_overlays.source.file_trees import DirectoryTree
from megacpp_overlays.source.trees import ModuleSource

pytestmark = pytest.mark.upstream

FILE = "tilelang/src/layout/utils.cc"


@pytest.mark.parametrize(
    ("lane", "verdict", "shape"),
    [
        ("spring-2026", Verdict.BROKEN, EQUALITY_ONLY),
        ("mamba3-pinned", Verdict.BROKEN, EQUALITY_ONLY),
        ("edge", Verdict.FIXED, None),
        ("newest", Verdict.ABSENT, None),
    ],
)
def test_the_verdict_on_locked_releases(lane: str, verdict: Verdict, shape: str | None) -> None:
    found = ask(probe, tree_of(lane))

    assert (found.verdict, found.shape) == (verdict, shape), found.summary()


@pytest.mark.parametrize(
    "edit",
    [
        None,
        {"bool match_full_iter =": "bool match_full_iter = mark->extent == 1 ||"},
        {"get_unused_iters": "get_left_over_iters"},
        {"return results;": "results.pop_back(); return results;"},
        {
            "expected_lower_factor = splits[j]->lower_factor * splits[j]->extent;": "expected_lower_factor = mark->extent;"
        },
    ],
)
def test_an_edited_or_missing_file_is_not_recognised(edit: dict[str, str] | None) -> None:
    assert ask(probe, Edited(tree_of("mamba3-pinned"), FILE, edit)).verdict is Verdict.UNRECOGNISED


def test_comments_and_layout_do_not_change_the_verdict() -> None:
    edit = {"bool match_full_iter =\n": "// as it was\n  bool   match_full_iter = /* or not */\n\n"}

    assert ask(probe, Edited(tree_of("mamba3-pinned"), FILE, edit)).shape == EQUALITY_ONLY


CONDITION = "analyzer->CanProve(expected_lower_factor > mark->extent)"
"""The condition that the repair adds."""


@pytest.mark.parametrize(
    ("lane", "edit"),
    [
        ("edge", {"Array<IterSplitExpr> get_unused_iters(": "#if 0\nArray<IterSplitExpr> get_unused_iters("}),
        ("mamba3-pinned", {"bool match_full_iter =": f'Said("{CONDITION}"); bool match_full_iter ='}),
        ("mamba3-pinned", {"bool match_full_iter =": f"\n#if 0\n{CONDITION};\n#endif\nbool match_full_iter ="}),
    ],
)
def test_a_repair_without_effect_is_not_fixed(lane: str, edit: dict[str, str]) -> None:
    assert ask(probe, Edited(tree_of(lane), FILE, edit)).verdict is not Verdict.FIXED


def test_a_repaired_file_with_added_comments_is_not_recognised() -> None:
    found = ask(probe, Edited(tree_of("edge"), FILE, {"#include": "// as it was\n#include"}))

    assert found.verdict is Verdict.UNRECOGNISED


def test_a_repair_without_its_condition_is_not_recognised() -> None:
    edit = {CONDITION: "false"}

    assert ask(probe, Edited(tree_of("edge"), FILE, edit)).verdict is Verdict.UNRECOGNISED


def test_the_condition_of_the_repair_in_a_comment_is_no_repair() -> None:
    edit = {"bool match_full_iter =\n": f"// {CONDITION}\n bool match_full_iter =\n"}

    assert ask(probe, Edited(tree_of("mamba3-pinned"), FILE, edit)).verdict is Verdict.BROKEN


def test_a_tree_that_hands_out_modules_only_is_not_recognised() -> None:
    class ModulesOnly:
        def module(self, name: str) -> ModuleSource | None:
            return ModuleSource(name, "tilelang/__init__.py", "")

    found = ask(probe, ModulesOnly())

    assert found.verdict is Verdict.UNRECOGNISED
    assert "hands out modules only" in found.summary()


def test_a_file_that_cannot_be_read_is_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "tilelang").mkdir()
    (tmp_path / "tilelang/__init__.py").touch()
    (tmp_path / "tilelang/transform.py").touch()
    (tmp_path / FILE).parent.mkdir(parents=True)
    (tmp_path / FILE).symlink_to(tmp_path / FILE)  # a link to itself

    found = ask(probe, DirectoryTree(tmp_path))

    assert found.verdict is Verdict.UNRECOGNISED
    assert "cannot read" in found.summary()
