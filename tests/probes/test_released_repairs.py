"""Probes on released repairs: FIXED for each repair, and for no edit of one that leaves the defect in."""

from __future__ import annotations

from pathlib import Path

import pytest
from probing import ask
from releases import only
from repair_cases import CASES

from megacpp_overlays.loader import registry
from megacpp_overlays.model import Proof, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

EDITS = [(name, edit) for name, case in CASES.items() for edit in case.edits]
DAILY = [(name, [*case.edits][number % len(case.edits)]) for number, (name, case) in enumerate(CASES.items())]
"""One edit of each repair, of another kind each; `make test-all` takes all of them."""


@pytest.mark.parametrize("name", CASES)
def test_a_repair_of_a_release_is_fixed_and_says_where_it_is(name: str) -> None:
    finding = CASES[name].ask(CASES[name].texts())

    assert (finding.verdict, finding.proof) == (Verdict.FIXED, Proof.READ), finding.summary()
    assert finding.repair


@pytest.mark.unmeasured
@pytest.mark.parametrize(("name", "edit"), only(EDITS, DAILY))
def test_an_edit_that_leaves_the_defect_in_is_never_fixed(name: str, edit: str) -> None:
    finding = CASES[name].ask(CASES[name].edited(CASES[name].edits[edit]))

    assert finding.verdict is not Verdict.FIXED, finding.summary()


def test_a_verdict_of_fixed_on_a_given_tree_names_the_repair(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        for each in registry.load():
            found = ask(each.probe, DirectoryTree(path))
            assert bool(found.repair) == (found.verdict is Verdict.FIXED), each.id
