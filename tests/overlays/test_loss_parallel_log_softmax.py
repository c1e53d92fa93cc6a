"""Losses of sharded logits with the overlay: gradients under `loss_parallel` are those of whole logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from placed_seams import placed, without_overlays
from places import ROOT
from reproduced_pack import assert_repaired, reproduced_in
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megacpp_overlays.feature_probes.loss_parallel_log_softmax import IDENTITY, TARGET
from megacpp_overlays.overlays.loss_parallel_log_softmax import OVERLAY, observe
from megacpp_overlays.repro import beside, neighbour

pytestmark = pytest.mark.upstream

FOLDER = ROOT / "packs/60-loss-parallel-log-softmax"
PACK = beside(str(FOLDER / "neighbours.py"))


@pytest.mark.parametrize("lane", ["current", "edge"])
def test_a_release_is_broken_without_the_overlay_and_right_with_it(lane: str) -> None:
    assert_repaired(reproduced_in(lane, "60"))


# In this process


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    """The module of `loss_parallel` without any overlay."""
    with without_overlays(TARGET.module) as found:
        yield found


@pytest.fixture
def repaired(module: ModuleType) -> Iterator[ModuleType]:
    """The same with the seams."""
    with placed(OVERLAY, IDENTITY, module):
        yield module


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    assert observe(module).broken
    with placed(OVERLAY, IDENTITY, module):
        assert not observe(module).broken
    assert observe(module).broken


@pytest.mark.parametrize("each", neighbour.load(FOLDER), ids=lambda each: each.name)
def test_what_is_right_without_the_overlay_has_the_same_bits(each: neighbour.Neighbour, module: ModuleType) -> None:
    without = neighbour.measured(each)
    with placed(OVERLAY, IDENTITY, module):
        found = neighbour.measured(each)

    assert neighbour.problem(each, without, found) is None


def softmax_twice(logits: Any, _teacher: Any, labels: Any) -> Any:
    """Cross entropy of logarithms of probabilities, which takes log_softmax once more."""
    return torch.nn.functional.cross_entropy(PACK._log_softmax(logits), labels)


def two_cross_entropies(logits: Any, _teacher: Any, labels: Any) -> Any:
    """Two losses of the same logarithms: their gradients are added before they reach log_softmax."""
    found = PACK._log_softmax(logits)
    losses = (
        torch.nn.functional.nll_loss(found, labels),
        torch.nn.functional.nll_loss(found, (labels + 1) % PACK.CLASSES),
    )
    return losses[0] + 2 * losses[1]


def changed_on_the_way(logits: Any, _teacher: Any, labels: Any) -> Any:
    """A hook that adds to the gradient of the logarithms."""
    found = PACK._log_softmax(logits)
    found.register_hook(lambda gradient: gradient + found.detach())
    return torch.nn.functional.nll_loss(found, labels)


def preference(logits: Any, _teacher: Any, labels: Any) -> Any:
    """The loss of DPO and ORPO: logarithms of chosen and rejected tokens, by weights of classes."""
    one = torch.nn.functional.one_hot(labels, PACK.CLASSES).to(logits.dtype)
    weights = 2 * one - one.roll(1, 0)
    found = PACK._log_softmax(logits)
    if isinstance(found, DTensor):
        weights = distribute_tensor(weights, found.device_mesh, [Shard(1)])
    return -(weights * found).sum().tanh()


LOSSES: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (softmax_twice, two_cross_entropies, preference)
}


def test_losses_have_the_gradients_of_whole_logits(repaired: ModuleType) -> None:
    found = PACK.gradients({**PACK.LOSSES, **LOSSES})

    assert {name: PACK.apart(found, name) < 1e-12 for name in (*PACK.LOSSES, *LOSSES)} == dict.fromkeys(
        (*PACK.LOSSES, *LOSSES), True
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2), ("float16", 2e-3)])
def test_half_precision_is_as_exact_as_on_one_rank(repaired: ModuleType, dtype: str, tolerance: float) -> None:
    found = PACK.gradients(PACK.LOSSES, dtype)

    assert {name: PACK.apart(found, name) < tolerance for name in PACK.LOSSES} == dict.fromkeys(PACK.LOSSES, True)


def test_passes_are_upstreams_again_after_the_context(repaired: ModuleType) -> None:
    passes = repaired.DTensor._op_dispatcher._custom_op_handlers
    before = dict(passes)
    with repaired.loss_parallel():
        assert passes != before
    assert passes == before


def test_a_gradient_that_a_hook_changes_is_no_longer_cross_entropys(repaired: ModuleType) -> None:
    found = PACK.gradients({"changed": changed_on_the_way})

    assert PACK.apart(found, "changed") < 1e-12
