"""The probe for gathered logits that are taken for a share of the vocabulary: given trees, and edits of the newest release."""

from __future__ import annotations

from pathlib import Path

import pytest
from edited_code import edited_release
from probing import Texts, ask

from megacpp_overlays.feature_probes.gathered_logits_loss import TARGET, probe
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

MAPPINGS = "megatron.core.tensor_parallel.mappings"


def edited(module: str, old: str, new: str) -> Finding:
    return ask(probe, edited_release(module, old, new))


def test_given_trees_are_broken(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        assert ask(probe, DirectoryTree(path)).verdict is Verdict.BROKEN, path


def test_what_is_not_there_is_absent() -> None:
    assert ask(probe, Texts({TARGET.module: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "class Other: pass"})).verdict is Verdict.ABSENT


@pytest.mark.parametrize(
    "text", ["from vendor import LanguageModule\n", "from vendor import *\n", "class LanguageModule: pass\n"]
)
def test_what_comes_from_elsewhere_is_not_absent(text: str) -> None:
    assert ask(probe, Texts({TARGET.module: text})).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (TARGET.module, "    def compute_language_model_loss(", "    @other\n    def compute_language_model_loss("),
        (
            TARGET.module,
            'labels: Tensor, logits: Tensor) -> Tensor:\n        """Computes',
            'labels: Tensor, logits: Tensor, more=None) -> Tensor:\n        """Computes',
        ),
        (TARGET.module, "class LanguageModule(", "@other\nclass LanguageModule("),
        (
            TARGET.module,
            "        labels = labels.transpose(0, 1).contiguous()\n",
            "        labels, logits = other(labels, logits)\n",
        ),
        (
            TARGET.module,
            "loss = fused_vocab_parallel_cross_entropy(logits,",
            "loss = fused_vocab_parallel_cross_entropy(other(logits),",
        ),
        (
            MAPPINGS,
            "    output = input_list[rank].contiguous()\n\n    return output\n\n\ndef _split_along_first_dim",
            "    output = input_list[-rank].contiguous()\n\n    return output\n\n\ndef _split_along_first_dim",
        ),
        (MAPPINGS, "class _ScatterToModelParallelRegion(", "@other\nclass _ScatterToModelParallelRegion("),
    ],
    ids=[
        "decorated",
        "a parameter more",
        "a decorated class",
        "other logits",
        "others when fused",
        "another share",
        "another region",
    ],
)
def test_all_that_the_seam_relies_on_must_be_as_it_was_read(module: str, old: str, new: str) -> None:
    assert edited(module, old, new).verdict is Verdict.UNRECOGNISED
