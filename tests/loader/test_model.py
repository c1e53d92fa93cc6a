"""The data refuses what would be a guess."""

from __future__ import annotations

import dataclasses

import pytest
from made_up import Upstream

from megacpp_overlays.model import Evidence, Finding, Verdict, variable_for

SEEN = (Evidence(seen="x = 1"),)


def test_a_broken_finding_names_its_shape() -> None:
    with pytest.raises(ValueError, match="must name the shape"):
        Finding(verdict=Verdict.BROKEN, shape=None, evidence=SEEN)


@pytest.mark.parametrize("verdict", Verdict)
def test_a_finding_without_evidence_is_refused(verdict: Verdict) -> None:
    with pytest.raises(ValueError, match="without evidence is a guess"):
        Finding(verdict=verdict, shape="off-by-one", evidence=())


@pytest.mark.parametrize(
    ("evidence", "text"),
    [
        (Evidence(seen="x = 1"), "x = 1"),
        (Evidence(seen="x = 1", file="/a/layers.py"), "x = 1 (layers.py)"),
        (Evidence(seen="x = 1", file="/a/layers.py", line=3), "x = 1 (layers.py:3)"),
    ],
)
def test_evidence_reads_as_what_and_where(evidence: Evidence, text: str) -> None:
    assert str(evidence) == text


def test_a_decision_is_replaced_and_never_edited(upstream: Upstream) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        upstream.overlay().id = "other"  # type: ignore[misc]


def test_an_overlay_has_no_field_that_can_be_forgotten(upstream: Upstream) -> None:
    assert all(field.default is dataclasses.MISSING for field in dataclasses.fields(upstream.overlay()))


def test_the_variable_of_an_overlay_follows_from_its_id() -> None:
    assert variable_for("scale-pad-2") == "MEGACPP_OVERLAY_SCALE_PAD_2"
