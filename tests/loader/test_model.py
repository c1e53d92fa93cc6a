"""Checks of the declarations: a field that would be a guess is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from made_up import Upstream

from megacpp_overlays.model import Body, Evidence, Finding, Proof, Text, Verdict, variable_for

SEEN = (Evidence(seen="x = 1"),)
REPAIR = (Body("layers", "Layer.forward"), Body("layers", ""), Text("src/sum.cc", "0" * 64))


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
def test_evidence_reads_as_observation_and_place(evidence: Evidence, text: str) -> None:
    assert str(evidence) == text


@pytest.mark.parametrize(
    "fields",
    [
        {"verdict": Verdict.FIXED},
        {"verdict": Verdict.FIXED, "proof": Proof.READ},
        {"verdict": Verdict.FIXED, "repair": REPAIR},
        {"verdict": Verdict.FIXED, "repair": REPAIR, "proof": Proof.READ, "looks_repaired": True},
        {"verdict": Verdict.UNRECOGNISED, "looks_repaired": True},
        {"verdict": Verdict.UNRECOGNISED, "repair": REPAIR},
        {"verdict": Verdict.UNRECOGNISED, "repair": REPAIR, "looks_repaired": True, "proof": Proof.WITNESSED},
        {"verdict": Verdict.ABSENT, "proof": Proof.READ},
        {"verdict": Verdict.ABSENT, "repair": REPAIR, "looks_repaired": True},
        {"verdict": Verdict.BROKEN, "shape": "off-by-one", "candidates": ("off-by-one",)},
        {"verdict": Verdict.BROKEN, "shape": "off-by-one", "proof": Proof.READ},
        {"verdict": Verdict.BROKEN, "shape": "off-by-one", "repair": REPAIR},
    ],
)
def test_only_a_repair_that_was_proved_is_fixed_and_nothing_else_is_proved(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"FIXED|looks repaired|names the bodies|is not proved"):
        Finding(**{"shape": None, "evidence": SEEN, **fields})


@pytest.mark.parametrize("proof", Proof)
def test_a_fixed_finding_names_the_bodies_and_the_proof(proof: Proof) -> None:
    found = Finding(verdict=Verdict.FIXED, shape=None, evidence=SEEN, repair=REPAIR, proof=proof)

    assert [str(each) for each in found.repair] == ["layers.Layer.forward", "layers", "src/sum.cc"]


def test_a_decision_is_replaced_and_never_edited(upstream: Upstream) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        upstream.overlay().id = "other"  # type: ignore[misc]


def test_an_overlay_has_no_field_that_can_be_forgotten(upstream: Upstream) -> None:
    """Exceptions are fields that most overlays do not need, and fields that are younger than existing plugins."""
    fields = dataclasses.fields(upstream.overlay())

    assert [field.name for field in fields if field.default is not dataclasses.MISSING] == [
        "brief",
        "until",
        "symptoms",
        "concerns",
        "needs",
        "needs_parts",
    ]


def test_the_variable_of_an_overlay_follows_from_its_id() -> None:
    assert variable_for("scale-pad-2") == "MEGACPP_OVERLAY_SCALE_PAD_2"
