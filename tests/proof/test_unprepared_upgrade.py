"""The kept run after an unprepared upgrade: its page, and when it holds."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from places import ROOT

RESULTS = ROOT / "proof/results/unprepared-upgrade.json"


@pytest.fixture
def receipts() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def test_the_page_is_made_of_the_receipts(receipts: dict[str, Any]) -> None:
    from unprepared_upgrade import page

    assert page(receipts) == RESULTS.with_suffix(".md").read_text()


def test_nearly_all_overlays_that_are_needed_are_active(receipts: dict[str, Any]) -> None:
    from unprepared_upgrade import holds

    needed = [row for row in receipts["rehearsal"]["rows"] if row["right"] == "active"]
    active = {row["overlay"] for row in needed if row["after"] == "active"}
    assert len(active) >= 23
    assert len(active) >= 0.92 * len(needed)
    assert holds(receipts)


def test_overlays_that_the_rehearsal_calls_active_are_active_in_the_table(receipts: dict[str, Any]) -> None:
    """The demo and the table have run with the witnesses of the rehearsal, not with the findings of today."""
    decided = {row["overlay"]: row["after"] for row in receipts["rehearsal"]["rows"]}
    for used in (receipts["demo"]["active"], receipts["table"]["active"]):
        megatron = {each for each in used if each in decided}
        assert {decided[each] for each in megatron} == {"active"}


def test_a_wrong_overlay_a_failed_claim_or_a_wrong_row_does_not_hold(receipts: dict[str, Any]) -> None:
    from unprepared_upgrade import holds

    def spoilt(*path: Any, value: Any) -> dict[str, Any]:
        found = copy.deepcopy(receipts)
        *parents, last = path
        at: Any = found
        for each in parents:
            at = at[each]
        at[last] = value
        return found

    needed = next(n for n, row in enumerate(receipts["rehearsal"]["rows"]) if row["right"] == "active")
    assert not holds(spoilt("rehearsal", "rows", needed, "after", value="retired"))
    assert not holds(spoilt("demo", "claims", 0, "outcome", value="FAILED"))
    assert not holds(spoilt("table", "holds", value=False))
