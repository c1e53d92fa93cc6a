"""The probe of local CUDA graphs with recomputed code: given trees, and edits of the newest release."""

from __future__ import annotations

from pathlib import Path

import pytest
from edited_code import edited_release
from probing import Texts, ask

from megacpp_overlays.feature_probes.graph_hidden_recompute_grads import GRAPHS, TARGET, probe
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

CONFIG, RANDOM = "megatron.core.transformer.transformer_config", "megatron.core.tensor_parallel.random"


def edited(module: str, old: str, new: str, release: str = "0.19.2") -> Finding:
    return ask(probe, edited_release(module, old, new, release=release))


def test_given_trees_are_not_taken_for_broken(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        assert ask(probe, DirectoryTree(path)).verdict in {Verdict.FIXED, Verdict.UNRECOGNISED}, path


def test_what_is_not_there_is_absent() -> None:
    for text in (None, "class Other: pass"):
        assert ask(probe, Texts({TARGET.module: text})).verdict is Verdict.ABSENT


def test_what_is_handed_on_is_not_absent() -> None:
    for text in ("from vendor import TransformerLayer\n", "class TransformerLayer(Other): pass\n"):
        texts = Texts({TARGET.module: text, GRAPHS: "class Manager:\n    graphs = ()\n"})
        assert ask(probe, texts).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (GRAPHS, "self.get_connected_params(fwd_graph_outputs)", "self.get_connected_params(self.outputs)"),
        (GRAPHS, "    def get_connected_params(self, outputs):", "    def get_connected_params(self, outputs, more=()):"),
        (CONFIG, '"gdn_norm_out",', '"gdn_norm_out", "another",'),
        (RANDOM, "        self.outputs = outputs\n", "        self.outputs = [outputs]\n"),
        (TARGET.module, "        super().__init__(config=config, vp_stage=vp_stage)", "        super().__init__(config=copied(config))"),
        (TARGET.module, "            CudaGraphModule.attn in self.config.cuda_graph_modules\n", "            CudaGraphModule.mlp in self.config.cuda_graph_modules\n"),
        (TARGET.module, "class TransformerLayer(", "@other\nclass TransformerLayer("),
    ],
    ids=["other outputs", "a parameter more", "another module", "a list in it", "a copy", "another part", "decorated"],
)  # fmt: skip
def test_what_is_captured_and_recomputed_must_be_as_it_was_read(module: str, old: str, new: str) -> None:
    assert edited(module, old, new).verdict is Verdict.UNRECOGNISED
