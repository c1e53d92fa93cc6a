"""The probe of pack 11 on the stand-in, real trees, releases, and edited code."""

from __future__ import annotations

import shutil
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
MTP = "transformer/multi_token_prediction.py"
FUSED = "fusions/fused_linear_cross_entropy.py"
LANGUAGE = "models/common/language_module/language_module.py"


WIRED = """
from megatron.core.transformer.linear_cross_entropy import LinearCrossEntropyModule


class {name}:
    def __init__(self, config):
        self.output_layer = LinearCrossEntropyModule(config)

    def forward(self, hidden, labels):
        return self.output_layer(hidden, output_cross_entropy_loss=True, labels=labels)
"""


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., DirectoryTree]:
    """Return a copy of the stand-in for dev with one piece of text replaced."""

    def edit(old: str, new: str, file: str = HYBRID) -> DirectoryTree:
        shutil.copytree(DEV, tmp_path, dirs_exist_ok=True)
        text = (tmp_path / CORE / file).read_text()
        assert old in text
        (tmp_path / CORE / file).write_text(text.replace(old, new))
        return DirectoryTree(tmp_path)

    return edit


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


def test_a_plain_output_layer_beside_the_fused_module_is_broken() -> None:
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
def test_a_model_that_makes_and_asks_it_in_a_way_that_nobody_read_is_not_recognised(
    written: Callable[..., DirectoryTree], name: str
) -> None:
    model = {"hybrid": "HybridModel", "mamba": "MambaModel"}[name]

    assert ask(feature.probe, written(layer="", **{name: WIRED.format(name=model)})).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize("lost", ["output_cross_entropy_loss=True, ", "LinearCrossEntropyModule(config)"])
@pytest.mark.parametrize("name", ["hybrid", "mamba"])
def test_half_a_wiring_is_not_recognised(written: Callable[..., DirectoryTree], name: str, lost: str) -> None:
    model = {"hybrid": "HybridModel", "mamba": "MambaModel"}[name]
    text = WIRED.format(name=model).replace(lost, "None" if "(" in lost else "")

    found = ask(feature.probe, written(layer="", **{name: text}))

    assert found.verdict is Verdict.UNRECOGNISED


def test_the_model_under_its_former_name_is_not_recognised_without_the_wiring(
    written: Callable[..., DirectoryTree],
) -> None:
    text = "class MambaModel:\n    def __init__(self): ...\n    def forward(self): ...\n"

    found = ask(feature.probe, written(layer="", mamba=text))

    assert found.verdict is Verdict.UNRECOGNISED


def test_text_that_cannot_be_parsed_is_not_recognised(written: Callable[..., DirectoryTree]) -> None:
    assert ask(feature.probe, written(layer="", hybrid="class HybridModel(:\n")).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("class HybridModel(LanguageModule, GraphableMegatronModule)", "class HybridModel(LanguageModule, Other)"),
        ("class HybridModel(LanguageModule, GraphableMegatronModule)", "@wrapped\nclass HybridModel(LanguageModule, GraphableMegatronModule)"),
        ("    def forward(\n        self,\n        input_ids", "    def _scale_logits(self, x): ...\n\n    def forward(\n        self,\n        input_ids"),
        ("    def forward(\n        self,\n        input_ids", "    def __getattr__(self, x): ...\n\n    def forward(\n        self,\n        input_ids"),
        ("    def forward(\n        self,\n        input_ids", "    @wrapped\n    def forward(\n        self,\n        input_ids"),
        ("    def forward(\n        self,\n        input_ids", "    def go(\n        self,\n        input_ids"),
        ("        decoder_input=None,\n        labels", "        decoder_input=None,\n        extra=None,\n        labels"),
        ("tensor_parallel.ColumnParallelLinear(", "tensor_parallel.Other("),
        ("        if post_process:\n", "        self.output_layer = None\n        if post_process:\n"),
        ("        if post_process:\n", "        self.output_layer: object = None\n        if post_process:\n"),
        ("        hidden_states = self.decoder(", "        super().forward()\n        hidden_states = self.decoder("),
        ("        hidden_states = self.decoder(", "        note(self)\n        hidden_states = self.decoder("),
        ("        hidden_states = self.decoder(", "        labels = labels.clone()\n        hidden_states = self.decoder("),
        ("        hidden_states = self.decoder(", "        self.output_layer(None)\n        hidden_states = self.decoder("),
        ("        return loss  #", "        return loss.mean()  #"),
        ("        loss = self.compute_language_model_loss(labels, logits)\n", "        loss = self.compute_language_model_loss(labels, logits.float())\n"),
        ("        logits = self._scale_logits(logits)\n", "        logits = self._scale_logits(logits)\n        logits = logits.float()\n"),
        ("        logits = self._scale_logits(logits)\n", ""),
        ("            return logits.transpose(0, 1)\n", "            return logits.transpose(0, 1)\n        else:\n            note()\n"),
        ("import torch\n", "import torch\nfrom megatron.core.transformer.linear_cross_entropy import LinearCrossEntropyModule\n"),
    ],
)  # fmt: skip
def test_an_edit_of_the_model_is_not_recognised(edited: Callable[..., DirectoryTree], old: str, new: str) -> None:
    assert ask(feature.probe, edited(old, new)).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (LAYER, "(tensor_parallel.ColumnParallelLinear)", "(tensor_parallel.Other)"),
        (LAYER, "    def forward(", "    def __init__(self): ...\n\n    def forward("),
        (LAYER, "    def forward(", "    bias = None\n\n    def forward("),
        (LAYER, '        reduction="none"', '        reduction="mean"'),
        (LAYER, "        ignore_index=-100,\n", "        ignore_index=-100,\n        z_loss=0.0,\n"),
        (LANGUAGE, "self.config.mup_output_mult", "self.config.logit_scale"),
        (LANGUAGE, "return logits *", "return soft_cap(logits) *"),
        (LANGUAGE, "def _scale_logits(", "def _scale("),
        (LANGUAGE, '== "native"', '!= "linear"'),
        (LANGUAGE, "        return loss\n", "        return loss + self.config.z_loss * logits.logsumexp(-1).t() ** 2\n"),
        (LANGUAGE, "        return loss\n", "        return self.add_z_loss(loss) if self.config.z_loss else loss\n"),
        (LANGUAGE, "return logits *", "return logits * 2 *"),
        (LAYER, "linear_cross_entropy(\n            hidden,", "linear_cross_entropy(\n            hidden * self.config.mup_output_mult,"),
        (LAYER, "linear_cross_entropy(\n            hidden,", "linear_cross_entropy(\n            self._scaled(hidden),"),
        (LAYER, "class LinearCrossEntropyModule", "def later():\n    LinearCrossEntropyModule.weight_scale = 2\n\n\nclass LinearCrossEntropyModule"),
        (FUSED, "        return loss\n", "        return loss * 2\n"),
        (MTP, "                labels=wanted,\n", "                labels=wanted + 0,\n"),
        (MTP, "heads[number],\n                weight=output_weight,\n                runtime_gather_output=runtime_gather_output,\n                output", "heads[number] * 2,\n                weight=output_weight,\n                runtime_gather_output=runtime_gather_output,\n                output"),
        (MTP, "                labels=wanted,\n", "                labels=wanted,\n                scale=2,\n"),
        (MTP, "                labels=wanted,\n", ""),
        (MTP, "            loss = output_layer(\n", "            loss = other_layer(\n"),
        (MTP, "    main, *heads", "    module = isinstance(output_layer, torch.nn.Module)\n    main, *heads"),
        (MTP, "def process_mtp_loss(", "def process_loss("),
    ],
)  # fmt: skip
def test_an_edit_of_what_the_model_relies_on_is_not_recognised(
    edited: Callable[..., DirectoryTree], file: str, old: str, new: str
) -> None:
    assert ask(feature.probe, edited(old, new, file)).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize("file", [LANGUAGE, MTP])
def test_a_tree_that_lacks_a_part_is_not_recognised(edited: Callable[..., DirectoryTree], file: str) -> None:
    tree = edited("HybridModel", "HybridModel")
    (tree.root / CORE / file).unlink()

    assert ask(feature.probe, tree).verdict is Verdict.UNRECOGNISED
