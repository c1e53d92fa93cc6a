"""Over which classes labels are smoothed: given trees, and edits of the newest release."""

from __future__ import annotations

from pathlib import Path

import pytest
from edited_code import edited_release
from probing import Texts, ask

from megacpp_overlays.feature_probes.tp_label_smoothing import (
    TARGET,
    probe,
)
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

FUNCTION, ENTRY = "_VocabParallelCrossEntropy", "vocab_parallel_cross_entropy"
UTILITY = "megatron.core.tensor_parallel.utils"


def edited(old: str, new: str, module: str = TARGET.module) -> Finding:
    return ask(probe, edited_release(module, old, new))


def test_given_trees_are_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        assert ask(probe, DirectoryTree(path)).verdict is not Verdict.UNRECOGNISED, path


def test_what_is_not_there_is_absent() -> None:
    assert ask(probe, Texts({TARGET.module: None})).verdict is Verdict.ABSENT


def test_a_module_that_goes_another_way_is_not_absent() -> None:
    one = f"def {ENTRY}(logits, target, label_smoothing=0.0):\n    return by_gathering(logits, target)\n"
    other = f"class {FUNCTION}:\n    @staticmethod\n    def forward(ctx, logits, target):\n        return logits\n"

    for text in (one, other, "class Other: pass"):
        assert ask(probe, Texts({TARGET.module: text})).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    def forward(ctx, vocab", "    def forward(ctx, more, vocab"),
        ("    @staticmethod\n    def forward(ctx", "    @other\n    @staticmethod\n    def forward(ctx"),
        ("    @staticmethod\n    def forward(ctx", "    def forward(ctx"),
        ("    @staticmethod\n    def backward(ctx", "    @staticmethod\n    @other\n    def backward(ctx"),
        (f"class {FUNCTION}(", f"@other\nclass {FUNCTION}("),
        (f"class {FUNCTION}(torch.autograd.Function)", f"class {FUNCTION}(Other)"),
        (f"def {ENTRY}(", f"@other\ndef {ENTRY}("),
        (f"def {ENTRY}(", f"{FUNCTION}.backward = other\n\n\ndef {ENTRY}("),
        (f"def {ENTRY}(", f"{FUNCTION}.__bases__ = other\n\n\ndef {ENTRY}("),
        (f"def {ENTRY}(", f"VocabParallelCrossEntropy.calculate_gradients = other\n\n\ndef {ENTRY}("),
        (f"def {ENTRY}(", f"if FLAG:\n    def {ENTRY}(): ...\n\n\ndef {ENTRY}("),
        (
            "        ctx.save_for_backward(exp_logits, target_mask",
            "        ctx.save_for_backward(target_mask, exp_logits",
        ),
        ("import torch\n", "from vendor import torch\n"),
        ("from megatron.core.utils import get_pg_rank, get_pg_size", "from vendor import get_pg_rank, get_pg_size"),
        ("from .utils import VocabUtility", "from vendor import VocabUtility"),
    ],
    ids=[
        "a parameter more",
        "decorated",
        "no static method",
        "backward decorated",
        "class decorated",
        "another base",
        "entry decorated",
        "backward set from outside",
        "bases set",
        "a helper set from outside",
        "under a flag",
        "saved in another order",
        "another torch",
        "sizes from elsewhere",
        "ranges from elsewhere",
    ],
)
def test_everything_that_numbers_go_through_must_be_as_it_was_read(old: str, new: str) -> None:
    assert edited(old, new).verdict is Verdict.UNRECOGNISED


def test_so_must_the_ranges_of_ranks() -> None:
    finding = edited("        index_f = rank * per_partition_vocab_size\n", "        index_f = 0\n", UTILITY)

    assert finding.verdict is Verdict.UNRECOGNISED
    assert f"{UTILITY}:VocabUtility" in finding.summary()
