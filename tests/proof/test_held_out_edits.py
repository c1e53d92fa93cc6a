"""Held-out edits of upstream: each applies to its tree, and the page is made of the receipts."""

from __future__ import annotations

import itertools
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from megacpp_overlays.source import published

RESULTS = ROOT / "proof/results/held-out-edits.json"
WHEELS = ROOT / ".cache/wheels"


@pytest.fixture
def edits(modules_of_proof: None) -> Any:
    from held_out.edits import load

    return load()


def batches(edits: Any, is_chosen: Callable[[Any], bool]) -> list[list[Any]]:
    from held_out.run import batches

    return batches([each for each in edits if is_chosen(each.tree)])


def files_of(batch: list[Any]) -> set[str]:
    return {change.file for each in batch for change in each.changes}


def test_edits_of_releases_apply_to_the_wheels(edits: Any) -> None:
    """`applied` refuses text that is not there exactly once, and a result that is not Python."""
    from held_out.edits import applied

    for batch in batches(edits, lambda tree: tree.version is not None):
        tree = batch[0].tree
        (wheel,) = WHEELS.glob(f"{tree.distribution.replace('-', '_')}-{tree.version}-*.whl")
        with zipfile.ZipFile(wheel) as opened:
            texts = {file: opened.read(file).decode() for file in files_of(batch)}
        assert applied(batch, texts) != texts


def test_edits_of_branches_apply_to_a_given_tree(edits: Any, upstream_trees: list[Path]) -> None:
    from held_out.edits import applied

    known = json.loads(published.FILE.read_text())["megatron-core"]
    fitted = 0
    for folder in upstream_trees:
        digest = published.digest_of_folder(str(folder / "megatron/core"))
        names = {name.partition(" ")[0] for name, each in known.items() if each == digest}
        for batch in batches(edits, lambda tree, names=names: tree.commit is not None and tree.name in names):
            texts = {file: (folder / file).read_text() for file in files_of(batch)}
            assert applied(batch, texts) != texts
            fitted += 1
    if not fitted:
        pytest.skip("no given tree is a head that an edit is for")


def test_no_overlay_is_edited_twice_in_a_tree(edits: Any) -> None:
    assert len({each.id for each in edits}) == len(edits)
    for batch in batches(edits, lambda tree: True):
        assert len({each.overlay for each in batch}) == len(batch)


def test_each_kind_has_at_least_ten_edits(edits: Any) -> None:
    found = {kind: [each.overlay for each in chosen] for kind, chosen in by_kind(edits).items()}
    assert {kind: overlays for kind, overlays in found.items() if len(overlays) < 10} == {}
    assert len({*found["same"]}) >= 10


def by_kind(edits: Any) -> dict[str, list[Any]]:
    def kind(each: Any) -> str:
        return str(each.kind.value)

    return {name: list(each) for name, each in itertools.groupby(sorted(edits, key=kind), kind)}


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [("same", {"retired", "absent"}), ("repair", {"active"}), ("back", {"retired", "absent"})],
)
def test_a_decision_is_judged_by_the_kind_of_its_edit(edits: Any, kind: str, wrong: set[str]) -> None:
    edit = by_kind(edits)[kind][0]
    decisions = ("active", "retired", "absent", "unproved", "conflict")
    assert {each for each in decisions if edit.is_wrong(each)} == wrong


def test_an_edit_that_does_not_apply_is_named(edits: Any) -> None:
    from held_out.edits import EditError, applied

    with pytest.raises(EditError, match=f"{edits[0].id}: its old text is 0 times in .* of 0.19.2"):
        applied(edits[:1], dict.fromkeys(files_of(edits[:1]), ""))


def test_an_edit_whose_result_is_no_python_is_named(edits: Any) -> None:
    from held_out.edits import EditError, applied

    (change,) = edits[0].changes
    with pytest.raises(EditError, match=f"is no Python after {edits[0].id}"):
        applied(edits[:1], {change.file: change.old + "\nif:\n"})


def test_the_page_is_made_of_the_receipts(edits: Any) -> None:
    from held_out.page import markdown
    from held_out.run import NOTES

    found, notes = (json.loads(path.read_text()) for path in (RESULTS, NOTES))
    assert [*found] == [each.id for each in edits if each.id in found]
    assert {*notes} <= {each.id for each in edits}
    assert markdown(edits, found, notes) == RESULTS.with_suffix(".md").read_text()


def test_overlays_stay_active_after_neutral_edits_and_retire_after_repairs(edits: Any) -> None:
    found = json.loads(RESULTS.read_text())
    judged = {kind: [each for each in chosen if each.id in found] for kind, chosen in by_kind(edits).items()}
    active = [found[each.id]["after"] == "active" for each in judged["same"]]
    assert sum(active) >= 0.9 * len(active)
    assert not [
        each.id for kind in ("same", "repair") for each in judged[kind] if each.is_wrong(found[each.id]["after"])
    ]


def test_each_wrong_decision_has_a_note(edits: Any) -> None:
    from held_out.run import NOTES

    found, notes = (json.loads(path.read_text()) for path in (RESULTS, NOTES))
    wrong = {each.id for each in edits if each.id in found and each.is_wrong(found[each.id]["after"])}
    assert wrong <= {*notes}
