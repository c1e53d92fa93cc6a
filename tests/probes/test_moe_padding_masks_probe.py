"""The probes of the axis that a router lays a padding mask over, and of the stages on which a model cuts it: given trees, and edits of the newest release."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from edited_code import edited_release
from probing import Texts, ask
from repair_cases import CASES

from megacpp_overlays.feature_probes import expert_bias_padding_mask as counts
from megacpp_overlays.feature_probes import pipeline_padding_mask as stages
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

FEATURES = (counts, stages)
MODEL, ROUTER = stages.TARGET.module, counts.TARGET.module


def edited(feature: ModuleType, old: str, new: str) -> Finding:
    return ask(feature.probe, edited_release(feature.TARGET.module, old, new))


def test_given_trees_are_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        tree = DirectoryTree(path)
        assert ask(counts.probe, tree).verdict in {Verdict.FIXED, Verdict.BROKEN}, path
        finding = ask(stages.probe, tree)
        assert finding.verdict is Verdict.BROKEN, path
        assert finding.shape in {stages.FIRST_STAGE, stages.DEFAULT_GROUP}


@pytest.mark.parametrize("feature", FEATURES, ids=["counts", "stages"])
@pytest.mark.parametrize("text", [None, "class Other: pass", "class TopKRouter: pass\n\n\nclass GPTModel: pass"])
def test_what_is_not_there_is_absent(feature: ModuleType, text: str | None) -> None:
    assert ask(feature.probe, Texts({feature.TARGET.module: text})).verdict is Verdict.ABSENT


@pytest.mark.parametrize("feature", FEATURES, ids=["counts", "stages"])
def test_a_mask_that_goes_elsewhere_is_not_absent(feature: ModuleType) -> None:
    for name, method in (("TopKRouter", "routing"), ("GPTModel", "forward")):
        text = f"class {name}:\n    def {method}(self, padding_mask):\n        return padding_mask\n"
        is_its_own = name == feature.TARGET.symbol.partition(".")[0]
        found = ask(feature.probe, Texts({feature.TARGET.module: text}))
        assert found.verdict is (Verdict.UNRECOGNISED if is_its_own else Verdict.ABSENT)


@pytest.mark.parametrize("feature", FEATURES, ids=["counts", "stages"])
@pytest.mark.parametrize("text", ["from vendor import TopKRouter, GPTModel", "from vendor import *"])
def test_what_comes_from_elsewhere_is_not_absent(feature: ModuleType, text: str) -> None:
    assert ask(feature.probe, Texts({feature.TARGET.module: text})).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("feature", "old", "new"),
    [
        (counts, "    @jit_fuser\n    def _apply_expert_bias(", "    def _apply_expert_bias("),
        (
            counts,
            "    def _apply_expert_bias(",
            "    def _apply_expert_bias(self, *given): ...\n\n    def _apply_expert_bias(",
        ),
        (counts, "class TopKRouter(", "@other\nclass TopKRouter("),
        (counts, "class TopKRouter(", f"{counts.COUNT} = other\n\n\nclass TopKRouter("),
        (counts, "if self.enable_expert_bias and torch.is_grad_enabled():", "if self.enable_expert_bias:"),
        (
            counts,
            "self.local_tokens_per_expert += routing_map.sum(dim=0)",
            "self.local_tokens_per_expert = routing_map.sum(dim=0)",
        ),
        (
            counts,
            "            padding_mask = padding_mask.reshape(-1)\n",
            "            padding_mask = ~padding_mask.reshape(-1)\n",
        ),
        (counts, "from megatron.core.jit import jit_fuser\n", "from vendor import jit_fuser\n"),
        (stages, "    def _preprocess(", "    @other\n    def _preprocess("),
        (stages, "    def _preprocess(", "    def _preprocess(self): ...\n\n    def _preprocess("),
        (stages, "class GPTModel(", "@other\nclass GPTModel("),
        (stages, "class GPTModel(", f"{stages.PREPROCESS} = other\n\n\nclass GPTModel("),
        (
            stages,
            "        elif self.pre_process:\n            if padding_mask",
            "        elif self.pre_process or FLAG:\n            if padding_mask",
        ),
        (
            stages,
            "            sequence_len_offset,\n            padding_mask,\n        )\n",
            "            padding_mask,\n            sequence_len_offset,\n        )\n",
        ),
        (stages, ") = preproc_output[:6]", ") = other(preproc_output)[:6]"),
    ],
    ids=[
        "not compiled",
        "two counts",
        "another router",
        "counts set from outside",
        "in evaluation",
        "the last alone",
        "the other way round",
        "compiled otherwise",
        "another preparation",
        "two preparations",
        "another model",
        "a preparation set from outside",
        "on other stages",
        "in another order",
        "unpacked otherwise",
    ],
)
def test_what_was_not_read_is_unrecognised(feature: ModuleType, old: str, new: str) -> None:
    assert edited(feature, old, new).verdict is Verdict.UNRECOGNISED


def test_upstream_s_own_repair_of_counts_is_known_in_a_release_too() -> None:
    case = CASES["expert-bias-padding-mask"]

    assert case.ask(case.texts()).verdict is Verdict.FIXED
