"""Whether local CUDA graphs find what only recomputed code uses: every release, main, dev, and edits of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import Texts, ask
from repair_cases import edited_release

from megacpp_overlays.feature_probes.graph_hidden_recompute_grads import (
    CONFIG,
    GRAPHS,
    NOT_FOUND,
    RANDOM,
    TARGET,
    probe,
)
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import ArchiveTree, DirectoryTree

WITHOUT_GRAPHS = ("0.1.0", "0.4.0", "0.8.0")
GIVEN_ALL = ("0.9.0", "0.10.0", "0.11.0", "0.12.0", "0.12.3", "0.13.1", "0.14.0", "0.15.0", "0.15.3")
NOT_FOUND_IN = (*("0.16.0", "0.16.1", "0.17.0", "0.17.1", "0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),)

Wheel = Callable[[str, str], Path]


def edited(module: str, old: str, new: str, release: str = "0.19.2") -> Finding:
    return ask(probe, edited_release(module, old, new, release=release))


@pytest.mark.parametrize("version", [*WITHOUT_GRAPHS, *GIVEN_ALL])
def test_releases_whose_graphs_look_for_no_parameters_are_absent(version: str, wheel: Wheel) -> None:
    assert probe(ArchiveTree(wheel("megatron-core", version))).verdict is Verdict.ABSENT


@pytest.mark.parametrize("version", NOT_FOUND_IN)
def test_releases_whose_graphs_do_not_find_them_are_broken(version: str, wheel: Wheel) -> None:
    finding = probe(ArchiveTree(wheel("megatron-core", version)))

    assert (finding.verdict, finding.shape) == (Verdict.BROKEN, NOT_FOUND)


def test_given_trees_are_not_taken_for_broken(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        assert ask(probe, DirectoryTree(path)).verdict in {Verdict.FIXED, Verdict.UNRECOGNISED}, path


def test_what_is_not_there_is_absent() -> None:
    for text in (None, "class Other: pass"):
        assert ask(probe, Texts({TARGET.module: text})).verdict is Verdict.ABSENT


def test_what_is_handed_on_is_not_absent() -> None:
    for text in ("from vendor import TransformerLayer\n", "class TransformerLayer(Other): pass\n"):
        assert ask(probe, Texts({TARGET.module: text})).verdict is Verdict.UNRECOGNISED


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
