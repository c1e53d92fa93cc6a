"""The probe of MoE layers of a prediction and of their z-loss: given trees, and edits of the newest release."""

from __future__ import annotations

from pathlib import Path

import pytest
from edited_code import edited_release
from probing import Texts, ask

from megacpp_overlays.feature_probes import hybrid_mtp_aux_loss as told
from megacpp_overlays.feature_probes import mtp_z_loss as divided
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree


def edited(feature: object, old: str, new: str, module: str = "") -> Finding:
    target = feature.TARGET.module  # type: ignore[attr-defined]
    return ask(feature.probe, edited_release(module or target, old, new))  # type: ignore[attr-defined]


def test_given_trees_are_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        for probe in (told.probe, divided.probe):
            assert ask(probe, DirectoryTree(path)).verdict is not Verdict.UNRECOGNISED, path


def test_what_is_not_there_is_absent() -> None:
    for feature in (told, divided):
        assert ask(feature.probe, Texts({feature.TARGET.module: None})).verdict is Verdict.ABSENT
        assert ask(feature.probe, Texts({feature.TARGET.module: "class Other: pass"})).verdict is Verdict.ABSENT


@pytest.mark.parametrize(
    ("feature", "text"),
    [
        (told, "class HybridStack:\n    pass\n"),
        (told, "class HybridStack:\n    def __init__(self, config):\n        self.layers = made(config)\n"),
        (divided, "from vendor import TopKRouter\n"),
        (divided, "from vendor import *\n"),
        (
            divided,
            "class TopKRouter:\n    def apply_z_loss(self, logits):\n        return logits\n\n    def routing(self):\n"
            "        return self.config.mtp_use_repeated_layer\n",
        ),
        (
            divided,
            "class TopKRouter:\n    def apply_z_loss(self, logits):\n        if self.config.mtp_use_repeated_layer:\n"
            "            logits = logits / self.config.mtp_num_layers\n        return logits\n",
        ),
    ],
    ids=[
        "no constructor",
        "made elsewhere",
        "imported",
        "a star",
        "asked elsewhere",
        "attached elsewhere",
    ],
)
def test_what_goes_another_way_is_not_recognised(feature: object, text: str) -> None:
    probe, module = feature.probe, feature.TARGET.module  # type: ignore[attr-defined]

    assert ask(probe, Texts({module: text})).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("class HybridStack(", "@other\nclass HybridStack("),
        ("class HybridStack(", "HybridStack.__init__ = other\n\n\nclass HybridStack("),
        ("        is_mtp_layer: bool = False,\n", "        more=None,\n        is_mtp_layer: bool = False,\n"),
        ("        self.is_mtp_layer = is_mtp_layer\n", "        self.is_mtp_layer = FLAG\n"),
    ],
    ids=["decorated", "set from outside", "a parameter more", "told otherwise"],
)
def test_the_stack_must_be_one_that_was_read(old: str, new: str) -> None:
    assert edited(told, old, new).verdict is Verdict.UNRECOGNISED


def test_so_must_what_divides_the_loss_of_a_router_that_is_told() -> None:
    finding = edited(
        told, "aux_loss = aux_loss / self.config.mtp_num_layers", "aux_loss = aux_loss / FLAG", divided.TARGET.module
    )

    assert finding.verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    def apply_z_loss(self, logits, ", "    def apply_z_loss(self, logits, more=None, "),
        ("    def apply_z_loss(", "    @other\n    def apply_z_loss("),
        ("class TopKRouter(Router)", "class TopKRouter(Other)"),
        ("class TopKRouter(", "TopKRouter.apply_z_loss = other\n\n\nclass TopKRouter("),
        ("z_loss_func(logits, moe_z_loss_coeff,", "z_loss_func(logits, 1.0,"),
    ],
    ids=["a parameter more", "decorated", "another base", "set from outside", "another coefficient"],
)
def test_the_z_loss_must_be_one_that_was_read(old: str, new: str) -> None:
    assert edited(divided, old, new).verdict is Verdict.UNRECOGNISED
