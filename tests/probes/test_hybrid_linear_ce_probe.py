"""The probe of pack 11 on the stand-in, real trees, and models that are wired otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import ask
from trees import STAND_INS

from megacpp_overlays.feature_probes import hybrid_linear_ce as feature
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays.hybrid_linear_ce import OVERLAY
from megacpp_overlays.source.file_trees import DirectoryTree

DEV = STAND_INS["dev-linear-cross-entropy"]
CORE = Path("megatron/core")
HYBRID = "models/hybrid/hybrid_model.py"
MAMBA = "models/mamba/mamba_model.py"
LAYER = "transformer/linear_cross_entropy.py"


WIRED = """
from megatron.core.transformer.linear_cross_entropy import LinearCrossEntropyModule


class {name}:
    def __init__(self, config):
        self.output_layer = LinearCrossEntropyModule(config)

    def forward(self, hidden, labels):
        return self.output_layer(hidden, output_cross_entropy_loss=True, labels=labels)
"""


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., DirectoryTree]:
    """Return a tree with these files alone."""

    def write(**texts: str) -> DirectoryTree:
        for name, text in texts.items():
            path = tmp_path / CORE / {"layer": LAYER, "mamba": MAMBA, "hybrid": HYBRID}[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return DirectoryTree(tmp_path)

    return write


def test_a_plain_output_layer_next_to_the_fused_module_is_broken() -> None:
    found = ask(feature.probe, DirectoryTree(DEV))

    assert (found.verdict, found.shape) == (Verdict.BROKEN, feature.PLAIN_OUTPUT_LAYER)
    assert "plain output layer" in found.summary()
    assert feature.PLAIN_OUTPUT_LAYER in OVERLAY.replacements
    assert ask(OVERLAY.probe, DirectoryTree(DEV)).verdict is not Verdict.FIXED


def test_real_trees_are_broken_or_have_no_such_module(upstream_trees: list[Path]) -> None:
    for tree in upstream_trees:
        found = ask(feature.probe, DirectoryTree(tree))

        has_module, has_model = (tree / CORE / LAYER).exists(), (tree / CORE / HYBRID).exists()
        expected = (Verdict.BROKEN if has_model else Verdict.UNRECOGNISED) if has_module else Verdict.ABSENT
        assert found.verdict is expected, found.summary()


def test_a_tree_without_the_models_has_nothing_to_wire(written: Callable[..., DirectoryTree]) -> None:
    found = ask(feature.probe, written(layer="class LinearCrossEntropyModule: ..."))

    assert found.verdict is Verdict.ABSENT


@pytest.mark.parametrize("name", ["hybrid", "mamba"])
def test_a_model_that_makes_and_calls_it_in_an_unknown_way_is_not_recognised(
    written: Callable[..., DirectoryTree], name: str
) -> None:
    model = {"hybrid": "HybridModel", "mamba": "MambaModel"}[name]

    assert ask(feature.probe, written(layer="", **{name: WIRED.format(name=model)})).verdict is Verdict.UNRECOGNISED


def test_the_model_under_its_former_name_is_not_recognised_without_the_wiring(
    written: Callable[..., DirectoryTree],
) -> None:
    text = "class MambaModel:\n    def __init__(self): ...\n    def forward(self): ...\n"

    found = ask(feature.probe, written(layer="", mamba=text))

    assert found.verdict is Verdict.UNRECOGNISED
