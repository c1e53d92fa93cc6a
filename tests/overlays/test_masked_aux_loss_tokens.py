"""Real MoE routers under padding masks with the overlay: balancing losses on two ranks have the gradients of one.

The measurements are in `masked_balances.py`, which runs in its own process for each release and forks ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from masked_balances import IDS, KINDS, MASKS
from placed_seams import assert_witness_and_self_test, stock
from places import SUPPORT
from releases import newest, weekly

from megacpp_overlays.feature_probes.masked_aux_loss_tokens import COUNTED_TWICE, TARGET
from megacpp_overlays.overlays.masked_aux_loss_tokens import OVERLAY

pytestmark = pytest.mark.upstream

OLDER, NEWEST = "0.19.0", newest()
MASKED = tuple(name for name in MASKS if name != "no mask")
ROUNDING = 1e-5


@pytest.fixture(scope="module", params=weekly(OLDER, NEWEST))
def measured(request: pytest.FixtureRequest, megatron_says: Callable[..., Any]) -> Any:
    """Results of a release with the overlays and without them."""
    return megatron_says(request.param, SUPPORT / "masked_balances.py")


def apart(one: list[float], other: list[float], *, times: float = 1.0) -> float:
    """Return how far a gradient is from so many times another, relative to the latter."""
    first, second = (torch.tensor(each, dtype=torch.float64) for each in (one, other))
    return float((first - times * second).norm() / (times * second).norm())


def test_the_overlays_at_the_same_routers_are_active_together(measured: Any) -> None:
    assert measured["decisions"] == dict.fromkeys(IDS, "active")


@pytest.mark.parametrize("kind", KINDS)
def test_upstream_s_gradients_are_as_many_times_too_large_as_there_are_ranks(measured: Any, kind: str) -> None:
    off = measured["off"]

    for mask in MASKED:
        way = f"{kind}, {mask}"
        assert apart(off["tensor"][way], off["one"][way], times=2) < ROUNDING, way


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_rank(measured: Any, kind: str) -> None:
    on, off = measured["on"], measured["off"]

    for mask in MASKS:
        way = f"{kind}, {mask}"
        assert apart(on["tensor"][way], off["one"][way]) < ROUNDING, way
        assert max(map(abs, on["tensor"][way])) > 0.01, way


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_without_padding_is_as_no_mask(measured: Any, kind: str) -> None:
    for ranks in measured["on"].values():
        assert apart(ranks[f"{kind}, nothing"], ranks[f"{kind}, no mask"]) < ROUNDING


@pytest.mark.parametrize("kind", KINDS)
def test_with_an_expert_bias_gradients_are_those_of_one_rank(measured: Any, kind: str) -> None:
    on = measured["on"]

    for mask in MASKS:
        way = f"{kind}, {mask}, biased"
        assert apart(on["tensor"][way], on["one"][way]) < ROUNDING, way
        assert apart(on["tensor"][way], on["tensor"][f"{kind}, {mask}"]) > 0.01, way


def test_packed_samples_are_balanced_as_a_batch_on_one_rank(measured: Any) -> None:
    for mask in MASKS:
        way = f"packed, {mask}"
        assert apart(measured["on"]["tensor"][way], measured["on"]["one"][f"seq_aux_loss, {mask}"]) < ROUNDING, way


def test_a_loss_over_data_parallel_ranks_is_divided_by_them_as_without_a_mask(measured: Any) -> None:
    """If each batch has its own loss, gradients are averaged over the batches in the end, with the same result."""
    on, off = measured["on"], measured["off"]

    for mask in MASKS:
        way = f"global_aux_loss, {mask}"
        assert apart(on["data"][way], on["one"][way], times=0.5) < ROUNDING, way
        assert apart(on["data"][f"{way}, for each batch"], on["one"][f"{way}, for each batch"]) < ROUNDING, way
        is_masked = mask in MASKED
        assert apart(off["data"][way], off["one"][way], times=1.0 if is_masked else 0.5) < ROUNDING, way


def test_all_else_is_upstream_s_bit_for_bit(measured: Any) -> None:
    on, off = measured["on"], measured["off"]

    assert on["one"].keys() > off["one"].keys()
    for ranks in ("one", "tensor", "data"):
        for way in off[ranks]:
            is_packed = way.startswith("packed") and ranks == "tensor"
            is_of_several = ranks == "tensor" or (ranks == "data" and way.startswith("global"))
            is_repaired = is_of_several and "no mask" not in way and "for each batch" not in way
            assert (on[ranks][way] != off[ranks][way]) == (is_repaired or is_packed), (ranks, way)


# In this process


module = stock(TARGET.module)


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    assert_witness_and_self_test(OVERLAY, module, COUNTED_TWICE)


@pytest.mark.parametrize(("is_masked", "right"), [(True, 5 / 2), (False, 5)])
def test_only_the_tokens_of_a_rank_are_others_and_only_under_a_mask(is_masked: bool, right: float) -> None:
    experts, total = torch.tensor([3, 7]), torch.tensor(5.0)
    given: list[Any] = []

    def upstream(*args: Any) -> Any:
        given.append(args)
        return experts, 5, total

    (replacement,) = OVERLAY.replacements[COUNTED_TWICE]
    group, routed = SimpleNamespace(size=lambda: 2), torch.ones(4, 2)
    counted = replacement.make(upstream, ModuleType("any"))(
        routing_map=routed, reduce_group=group, with_padding_mask=is_masked, topk=2
    )

    assert given == [(routed, group, 2, is_masked)]
    assert counted[0] is experts
    assert counted[2] is total
    assert float(counted[1]) == right
