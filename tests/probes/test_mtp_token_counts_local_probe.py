"""The probe of the tokens that a further prediction is weighed with: given trees, and edits of the newest release."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from edited_code import edited_release
from probing import Texts, ask, parsed_once

from megacpp_overlays.feature_probes.mtp_token_counts_local import (
    LOCAL,
    LOCAL_OF_LISTS,
    LOSS,
    ROLL,
    SCALER,
    TARGET,
    probe,
)
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

WITHOUT_COUNTS = ("0.12.0", "0.16.1")

Wheel = Callable[[str, str], Path]


def edited(old: str, new: str) -> Finding:
    return ask(probe, edited_release(TARGET.module, old, new))


@pytest.mark.parametrize("version", WITHOUT_COUNTS)
def test_releases_that_weigh_with_no_counts_are_absent(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert finding.verdict is Verdict.ABSENT
    assert finding.evidence[0].seen == f"defines no {LOSS}"


def test_given_trees_are_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        finding = ask(probe, DirectoryTree(path))
        assert finding.verdict is Verdict.BROKEN, path
        assert finding.shape in {LOCAL, LOCAL_OF_LISTS}


def test_what_is_not_there_is_absent() -> None:
    assert ask(probe, Texts({TARGET.module: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "class Other: pass"})).verdict is Verdict.ABSENT


@pytest.mark.parametrize("name", [LOSS, ROLL])
@pytest.mark.parametrize("how", ["a parameter more", "decorated", "under a flag", "twice", "set below", "its code set"])
def test_both_functions_must_be_ones_that_were_read(name: str, how: str) -> None:
    head = f"def {name}("
    new = {
        "a parameter more": f"{head}more, ",
        "decorated": f"@other\n{head}",
        "under a flag": f"if FLAG:\n    def {name}(): ...\n\n\n{head}",
        "twice": f"def {name}(): ...\n\n\n{head}",
        "set below": f"{name} = other\n\n\n{head}",
        "its code set": f"{name}.__code__ = other\n\n\n{head}",
    }[how]

    assert edited(head, new).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"class {SCALER}(torch.autograd.Function)", f"class {SCALER}(Other)"),
        (f"class {SCALER}(", f"@other\nclass {SCALER}("),
        (f"def {LOSS}(", f"{SCALER}.backward = other\n\n\ndef {LOSS}("),
        ("torch.ones_like(mtp_loss) * mtp_loss_backward_scale", "torch.ones_like(mtp_loss)"),
        ("    original_num_tokens = loss_mask.sum()\n", "    original_num_tokens = loss_mask.count_nonzero()\n"),
        ("        loss_mask, num_tokens = roll_tensor(\n", "        num_tokens, loss_mask = roll_tensor(\n"),
        ("import torch\n", "from vendor import torch\n"),
        (
            "from megatron.core import InferenceParams, parallel_state",
            "from vendor import InferenceParams, parallel_state",
        ),
    ],
    ids=[
        "another base",
        "class decorated",
        "backward set from outside",
        "not scaled",
        "counted otherwise",
        "the other way round",
        "another torch",
        "ranks from elsewhere",
    ],
)
def test_everything_that_a_weight_goes_through_must_be_as_it_was_read(old: str, new: str) -> None:
    assert edited(old, new).verdict is Verdict.UNRECOGNISED
