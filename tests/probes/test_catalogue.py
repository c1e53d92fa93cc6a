"""Catalogues of other repairs: for every overlay, repairs of another kind than upstream's, on which no seam is installed."""

from __future__ import annotations

import ast
from collections import Counter

import otherwise_cases
import pytest
from otherwise_cases import Otherwise
from releases import only

from megacpp_overlays.loader import registry
from megacpp_overlays.model import Verdict

FEWEST = 4
OVERLAYS = sorted({each.id for each in registry.load()})
EDITS = [(name, edit) for name, case in otherwise_cases.CASES.items() for edit in case.edits]
DAILY = [
    (name, [*case.edits][number % len(case.edits)]) for number, (name, case) in enumerate(otherwise_cases.CASES.items())
]
"""One repair of each case, of another kind each; `make test-all` takes all of them."""


def test_an_overlay_has_repairs_of_another_kind() -> None:
    found = Counter[str]()
    for each in otherwise_cases.CASES.values():
        found[each.overlay] += len(each.edits)

    assert [each for each in OVERLAYS if found[each] < FEWEST] == [], "tests/support/otherwise_cases.py"
    assert {*found} <= {*OVERLAYS}


@pytest.fixture
def case(name: str) -> Otherwise:
    return otherwise_cases.CASES[name]


@pytest.mark.upstream
@pytest.mark.parametrize("name", otherwise_cases.CASES)
def test_each_text_that_is_repaired_otherwise_is_broken_before_the_edit(name: str, case: Otherwise) -> None:
    found = case.ask(case.texts())

    assert found.verdict is Verdict.BROKEN, found.summary()
    assert case.said.keys() <= case.edits.keys()


@pytest.mark.upstream
@pytest.mark.parametrize(("name", "edit"), only(EDITS, DAILY), ids=[f"{name}-{edit}" for name, edit in EDITS])
def test_a_repair_of_another_kind_is_neither_fixed_nor_repaired_again(name: str, edit: str, case: Otherwise) -> None:
    expected, why = case.said.get(edit, (Verdict.UNRECOGNISED, "it is no recorded form"))
    texts = case.edited(case.edits[edit])

    found = case.ask(texts)

    assert expected is not Verdict.FIXED
    assert found.verdict is expected, f"{found.summary()}; expected because {why}"
    for module, text in texts.items():
        assert ":" in module or text is None or ast.parse(text)
