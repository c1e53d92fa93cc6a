"""The probe of the number of tokens by which a rank's loss is divided: releases that divide otherwise, given trees, and edits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from edited_code import archive, edited_release
from probing import Texts, ask, parsed_once

from megacpp_overlays.feature_probes.cp_local_loss_mean import FUNCTION, TARGET, probe
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

CALLER = "forward_step"
DDP = "megatron.core.distributed.distributed_data_parallel"
NO_COUNT = ("0.5.0", "0.6.0")
OF_ALL_RANKS = ("0.7.0", "0.12.3")

Wheel = Callable[[str, str], Path]


def edited(old: str, new: str, module: str = TARGET.module, release: str = "0.19.2") -> Finding:
    return ask(probe, edited_release(module, old, new, release=release))


@pytest.mark.parametrize("version", [*NO_COUNT, *OF_ALL_RANKS])
def test_launchers_of_old_releases_divide_or_count_the_tokens_of_all_ranks(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert finding.verdict is Verdict.ABSENT
    assert ("of all ranks" if version in OF_ALL_RANKS else "no number of tokens") in finding.summary()


def test_given_trees_are_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        assert ask(probe, DirectoryTree(path)).verdict is not Verdict.UNRECOGNISED, path


def test_what_is_not_there_is_absent() -> None:
    assert ask(probe, Texts({TARGET.module: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "class Other: pass"})).verdict is Verdict.ABSENT


def test_what_comes_from_elsewhere_is_not_absent() -> None:
    for name in (FUNCTION, CALLER):
        text = f"from vendor import {name}\n"
        assert ask(probe, Texts({TARGET.module: text})).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize("release", ["0.11.0", "0.13.1"])
def test_an_old_step_that_nobody_read_is_not_recognised(release: str) -> None:
    finding = edited("output_tensor /= num_tokens", "output_tensor /= counted(num_tokens)", release=release)

    assert finding.verdict is Verdict.UNRECOGNISED
    assert CALLER in finding.summary()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"def {FUNCTION}(", f"@other\ndef {FUNCTION}("),
        (f"def {FUNCTION}(", f"if FLAG:\n    def {FUNCTION}(): ...\n\n\ndef {FUNCTION}("),
        (f"\ndef {CALLER}(\n", f"\n{FUNCTION} = other({FUNCTION})\n\n\ndef {CALLER}(\n"),
        (f"\ndef {CALLER}(\n", f"\n@other\ndef {CALLER}(\n"),
        ("    model,\n    output_tensor,\n    loss_func,\n", "    model,\n    loss_func,\n    output_tensor,\n"),
        ("output_tensor /= torch.clamp(num_tokens, min=1)", "output_tensor /= torch.clamp(num_tokens, min=2)"),
        ("                    output_tensor /= num_microbatches\n", ""),
        ("                if not config.calculate_per_token_loss:\n", "                if FLAG:\n"),
        ("        cp_group_size,\n        is_last_stage,\n    )", "        1,\n        is_last_stage,\n    )"),
        ("import torch\n", "from vendor import torch\n"),
        ("from megatron.core import parallel_state\n", "from vendor import parallel_state\n"),
        ("    return torch.ones(1, device=device)\n", "    return torch.ones(2, device=device)\n"),
    ],
    ids=[
        "decorated",
        "under a flag",
        "bound again",
        "its caller decorated",
        "parameters in another order",
        "another clamp",
        "microbatches left out",
        "another condition",
        "its caller gives another size",
        "another torch",
        "groups from elsewhere",
        "another helper",
    ],
)
def test_everything_that_the_loss_goes_through_must_be_as_it_was_read(old: str, new: str) -> None:
    assert edited(old, new).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gradient_scaling_factor = 1.0 / data_parallel_world_size", "gradient_scaling_factor = 1.0"),
        ("        # Allocate buffers", "        gradient_scaling_factor = weighted()\n        # Allocate buffers"),
    ],
    ids=["summed", "set once more"],
)
def test_so_must_the_mean_over_ranks(old: str, new: str) -> None:
    finding = edited(old, new, DDP)

    assert finding.verdict is Verdict.UNRECOGNISED
    assert "DistributedDataParallel.__init__" in finding.summary()


def test_without_that_mean_nothing_is_said() -> None:
    tree = archive("megatron_core-0.19.2")

    assert ask(probe, Texts({DDP: None}, tree)).verdict is Verdict.UNRECOGNISED
