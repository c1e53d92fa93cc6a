"""The probe for token counts of all ranks in place of one rank's: releases without the defect, and edits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from edited_code import archive, edited_release
from probing import Texts, ask, parsed_once

from megacpp_overlays.feature_probes.masked_aux_loss_tokens import FUNCTION, TARGET, probe
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

COUNTED_ONCE = ("0.16.0", "0.18.2")
MAPPINGS, ROUTER = "megatron.core.tensor_parallel.mappings", "megatron.core.transformer.moe.router"

Wheel = Callable[[str, str], Path]


def edited(module: str, old: str, new: str, *, release: str = "0.19.2") -> Finding:
    return ask(probe, edited_release(module, old, new, release=release))


@pytest.mark.parametrize("version", COUNTED_ONCE)
def test_releases_that_multiply_by_a_count_alone_are_absent(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert finding.verdict is Verdict.ABSENT
    assert "by a count alone" in finding.summary()


def test_given_trees_are_broken_or_not_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        expected = {Verdict.BROKEN, Verdict.UNRECOGNISED}
        assert ask(probe, DirectoryTree(path)).verdict in expected, path


def test_what_is_not_there_is_absent() -> None:
    assert ask(probe, Texts({TARGET.module: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "def other(): pass"})).verdict is Verdict.ABSENT


@pytest.mark.parametrize(
    "text", [f"from vendor import {FUNCTION}\n", "from vendor import *\n", f"{FUNCTION} = vendor.counted\n"]
)
def test_what_comes_from_elsewhere_is_not_absent(text: str) -> None:
    assert ask(probe, Texts({TARGET.module: text})).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize("module", [ROUTER, MAPPINGS])
def test_without_the_router_or_the_reduction_nothing_is_recognised(module: str) -> None:
    assert ask(probe, Texts({module: None}, archive("megatron_core-0.19.2"))).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (TARGET.module, f"def {FUNCTION}(", f"@other\ndef {FUNCTION}("),
        (TARGET.module, "    with_padding_mask: bool = False,\n) -> torch", "    *more,\n) -> torch"),
        (TARGET.module, "    local_tokens_per_expert = routing_map.sum(dim=0)\n", "    local_tokens_per_expert = other(routing_map)\n"),
        (TARGET.module, "= global_tokens_per_expert.sum() / topk", "= global_tokens_per_expert.sum() // topk"),
        (ROUTER, "aux_loss * num_local_tokens * self.tp_cp_group.size()", "aux_loss * num_local_tokens * self.tp_group.size()"),
        (ROUTER, "                reduce_group=self.tp_cp_group,\n", "                reduce_group=self.tp_group,\n"),
        (ROUTER, "            valid_token_count=local_num_tokens * bsz,\n", "            valid_token_count=local_num_tokens,\n"),
        (ROUTER, "                reduce_group=self.tp_dp_cp_group,\n", "                reduce_group=self.tp_cp_group,\n"),
        (ROUTER, "class TopKRouter(", "@other\nclass TopKRouter("),
        (MAPPINGS, "    torch.distributed.all_reduce(input_, group=group)\n", "    input_ = other(input_, group)\n"),
        (MAPPINGS, "        return _reduce(input_, group)\n", "        return _reduce(input_.clone(), group)\n"),
        (MAPPINGS, "def reduce_from_tensor_model_parallel_region(", "@other\ndef reduce_from_tensor_model_parallel_region("),
    ],
    ids=[
        "decorated",
        "other parameters",
        "other counts",
        "whole numbers",
        "other ranks",
        "another group",
        "another batch",
        "another group of all",
        "a decorated router",
        "another sum",
        "a sum of a copy",
        "a decorated sum",
    ],
)  # fmt: skip
def test_an_edit_of_any_code_that_the_seam_relies_on_is_not_recognised(module: str, old: str, new: str) -> None:
    assert edited(module, old, new).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize("release", COUNTED_ONCE)
def test_an_edit_of_a_release_that_multiplies_by_a_count_alone_is_not_recognised(release: str) -> None:
    for module, old, new in (
        (TARGET.module, "routing_map.sum(dim=0)\n", "other(routing_map)\n"),
        (ROUTER, "    def attach_and_log_", "    @other\n    def attach_and_log_"),
    ):
        assert edited(module, old, new, release=release).verdict is Verdict.UNRECOGNISED
