"""QK clipping with the overlay: each head is scaled by the threshold over its own largest logit where that is larger, and else not at all.

Cases of pack 50 run on releases, in a process of its own for each; everything else runs on the newest one in this process.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from placed_seams import overlays_out, placed
from places import ROOT
from releases import newest
from reproduced_pack import assert_repaired, measured_on
from upstream_imports import upstream_module

from megacpp_overlays.feature_probes.qk_clip_negative_head import DIVIDED, GROUPED
from megacpp_overlays.overlays.qk_clip_negative_head import PARTS
from megacpp_overlays.repro import beside, neighbour

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*tp_group is None")]

FOLDER = ROOT / "packs/50-qk-clip-negative-head"
PACK = beside(str(FOLDER / "neighbours.py"))
LOGITS = st.lists(st.floats(-1e4, 1e4, width=32), min_size=4, max_size=4)


measured = measured_on("50", "0.16.1", "0.18.2", newest())


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured, parts=2)


# In this process


@pytest.fixture(scope="module")
def modules() -> Iterator[Mapping[str, ModuleType]]:
    """Modules of the newest release, without any overlay."""
    found = {part.target.module: upstream_module(part.target.module) for part in PARTS}
    with overlays_out():
        yield found


@contextlib.contextmanager
def repaired(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Put the seams of both parts in."""
    with contextlib.ExitStack() as entered:
        for part in PARTS:
            entered.enter_context(placed(part, DIVIDED, modules[part.target.module]))
        yield


@pytest.fixture
def clip(modules: Mapping[str, ModuleType]) -> Iterator[Callable[[Any], None]]:
    """The method that clips the weights of an attention with grouped queries, with the seam."""
    with repaired(modules):
        yield modules[GROUPED.module].SelfAttention.clip_qk


def attention(logits: Any, threshold: float = PACK.THRESHOLD, *, enabled: bool = True) -> Any:
    """Return a stand-in for an attention with two groups of two queries, with the attributes that clipping reads."""
    return SimpleNamespace(
        config=SimpleNamespace(qk_clip=enabled, qk_clip_threshold=threshold),
        core_attention=SimpleNamespace(current_max_attn_logits=logits),
        num_attention_heads_per_partition=4,
        num_query_groups_per_partition=2,
        linear_qkv=SimpleNamespace(weight=torch.ones(1)),
        _clip_linear_qkv=lambda given: given,
    )


@pytest.mark.parametrize("part", PARTS, ids=lambda each: each.target.symbol)
def test_the_witness_sees_the_defect_and_the_self_test_its_absence(
    part: Any, modules: Mapping[str, ModuleType]
) -> None:
    module = modules[part.target.module]
    assert part.witness(module).broken
    with placed(part, DIVIDED, module):
        assert not part.self_test(module).broken
    assert part.witness(module).broken


def test_the_newest_release_is_broken_without_the_overlay_and_right_with_it(modules: Mapping[str, ModuleType]) -> None:
    assert all(case.run().broken for case in PACK.CASES)
    with repaired(modules):
        assert not any(case.run().broken for case in PACK.CASES)


@pytest.mark.parametrize("each", neighbour.load(FOLDER), ids=lambda each: each.name)
def test_results_that_are_right_without_the_overlay_have_the_same_bits(
    each: neighbour.Neighbour, modules: Mapping[str, ModuleType]
) -> None:
    without = neighbour.measured(each)
    with repaired(modules):
        assert neighbour.problem(each, without, neighbour.measured(each)) is None


@given(logits=LOGITS, threshold=st.floats(1e-3, 1e3), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_factors_of_positive_logits_are_upstreams_and_others_are_one(
    modules: Mapping[str, ModuleType], logits: list[float], threshold: float, dtype: torch.dtype
) -> None:
    largest = torch.tensor(logits).to(dtype)
    stock, ours = (attention(largest.clone(), threshold) for _ in range(2))

    modules[GROUPED.module].SelfAttention.clip_qk(stock)
    with repaired(modules):
        modules[GROUPED.module].SelfAttention.clip_qk(ours)

    assert ours.core_attention.current_max_attn_logits is None
    assert hasattr(ours, "qk_clip_balancing_eta") is hasattr(stock, "qk_clip_balancing_eta")
    if hasattr(stock, "qk_clip_balancing_eta"):
        positive = largest.view(2, 2).amax(1) > 0
        factors = (each.qk_clip_balancing_eta.flatten() for each in (ours, stock))
        assert [*next(factors)] == [each if right else 1 for each, right in zip(next(factors), positive, strict=True)]


def test_a_head_that_saw_no_key_is_left_alone(clip: Callable[[Any], None]) -> None:
    made = attention(torch.tensor([-math.inf, -math.inf, 400.0, 1.0]))

    clip(made)

    assert made.qk_clip_balancing_eta.flatten().tolist() == [1.0, 0.25]


@pytest.mark.parametrize("logits", [None, torch.ones(3), torch.tensor([400.0, -1.0, 1.0, 1.0])])
def test_a_call_that_upstream_refuses_raises_its_error_and_keeps_the_logits(
    clip: Callable[[Any], None], logits: Any
) -> None:
    made = attention(logits, enabled=logits is None or len(logits) < 4)

    with pytest.raises((ValueError, AssertionError), match=r"qk_clip|current_max_attn_logits"):
        clip(made)

    assert made.core_attention.current_max_attn_logits is logits


def test_a_threshold_that_is_no_positive_number_is_upstreams(
    modules: Mapping[str, ModuleType], clip: Callable[[Any], None]
) -> None:
    made = attention(torch.tensor([400.0, -1.0, 1.0, 1.0]), -2.0)

    clip(made)

    assert made.qk_clip_balancing_eta.flatten().tolist() == pytest.approx([-2.0 / 400.0, -2.0])
