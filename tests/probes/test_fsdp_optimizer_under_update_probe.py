"""The probe for a step of Megatron-FSDP with an optimizer that it prepares: releases without one, given trees, and edits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from edited_code import edited_release
from probing import Texts, ask, parsed_once

from megacpp_overlays.feature_probes.fsdp_optimizer_under_update import FUNCTION, TARGET, probe
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

WITHOUT_FSDP = ("0.1.0", "0.13.1")
WITHOUT_STEP = ("0.14.0", "0.16.1")

Wheel = Callable[[str, str], Path]


def edited(old: str, new: str, release: str = "0.19.2") -> Finding:
    return ask(probe, edited_release(TARGET.module, old, new, release=release))


@pytest.mark.parametrize("version", [*WITHOUT_FSDP, *WITHOUT_STEP])
def test_releases_that_take_no_step_are_absent(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert finding.verdict is Verdict.ABSENT
    assert ("no step is taken" in finding.summary()) is (version in WITHOUT_STEP)


def test_given_trees_are_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        assert ask(probe, DirectoryTree(path)).verdict in {Verdict.BROKEN, Verdict.FIXED}, path


def test_what_is_not_there_is_absent() -> None:
    assert ask(probe, Texts({TARGET.module: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "class Other: pass"})).verdict is Verdict.ABSENT


def test_what_comes_from_elsewhere_is_not_absent() -> None:
    for text in (f"from vendor import {FUNCTION}\n", "from vendor import *\n"):
        assert ask(probe, Texts({TARGET.module: text})).verdict is Verdict.UNRECOGNISED


def test_what_takes_no_step_and_was_not_read_is_not_absent() -> None:
    finding = edited("            model.zero_grad_buffer()\n", "            pass\n", release="0.14.0")

    assert finding.verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"def {FUNCTION}(", f"@other\ndef {FUNCTION}("),
        (
            f"\n@experimental_api\ndef {FUNCTION}(",
            f"\nif FLAG:\n    def {FUNCTION}(): ...\n\n\n@experimental_api\ndef {FUNCTION}(",
        ),
        (
            "    optimizer: torch.optim.Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True\n",
            "    preproc_state_dict_for_dcp_ckpt=True, optimizer=None\n",
        ),
        (
            "    optimizer.step()\n    optimizer.zero_grad()\n",
            "    optimizer.step()\n    optimizer.step()\n    optimizer.zero_grad()\n",
        ),
        (
            "    optimizer.step()\n    optimizer.zero_grad()\n",
            "    optimizer.step(zero_gradients)\n    optimizer.zero_grad()\n",
        ),
        ("    optimizer_step_base_func = type(optimizer).step\n", "    optimizer_step_base_func = optimizer.step\n"),
        ("    func._experimental_api = True\n    return func\n", "    return once(func)\n"),
        ("import torch\n", "from vendor import torch\n"),
        ("from .utils import FSDPDistributedIndex, create", "from .other import FSDPDistributedIndex, create"),
    ],
    ids=[
        "decorated",
        "under a flag",
        "parameters in another order",
        "two steps",
        "a step with an argument",
        "the step of the instance",
        "another decorator",
        "another torch",
        "a helper from elsewhere",
    ],
)
def test_all_of_it_must_be_as_it_was_read(old: str, new: str) -> None:
    assert edited(old, new).verdict is Verdict.UNRECOGNISED
