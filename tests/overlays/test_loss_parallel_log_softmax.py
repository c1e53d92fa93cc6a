"""Losses of sharded logits with the overlay: gradients under `loss_parallel` are those of whole logits."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from placed_seams import assert_self_test, placed, stock
from reproduced_pack import answer_of, assert_repaired, reproduced_in

from megacpp_overlays.feature_probes.loss_parallel_log_softmax import IDENTITY, TARGET
from megacpp_overlays.overlays.loss_parallel_log_softmax import OVERLAY

pytestmark = pytest.mark.upstream


@pytest.mark.parametrize("lane", ["current", "edge"])
def test_a_release_is_broken_without_the_overlay_and_right_with_it(lane: str) -> None:
    assert_repaired(reproduced_in(lane, "60"))


# In this process


module = stock(TARGET.module)


@pytest.fixture
def repaired(module: ModuleType) -> Iterator[ModuleType]:
    """The module with the seams."""
    with placed(OVERLAY, IDENTITY, module):
        yield module


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    assert_self_test(OVERLAY, module, IDENTITY)


@pytest.fixture(scope="module")
def found() -> Any:
    """Results of losses and neighbours in a process that has run no backward pass, because ranks are forked from it."""
    return answer_of("loss_parallel_ranks.py")


def test_results_that_are_right_without_the_overlay_have_the_same_bits(found: Any) -> None:
    assert set(found["neighbours"].values()) == {None}, found["neighbours"]
    assert len(found["neighbours"]) == 7


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-6), ("bfloat16", 2e-2), ("float16", 2e-3)]
)
def test_losses_have_the_gradients_of_whole_logits(found: Any, dtype: str, tolerance: float) -> None:
    off = found["off"][dtype]

    assert {"distillation", "entropy"} < off.keys()
    assert (
        dtype != "float64" or {"preference", "softmax_twice", "changed_on_the_way", "two_cross_entropies"} < off.keys()
    )
    assert max(off.values()) < tolerance, off


def test_passes_are_upstreams_again_after_the_context(repaired: ModuleType) -> None:
    passes = repaired.DTensor._op_dispatcher._custom_op_handlers
    before = dict(passes)
    with repaired.loss_parallel():
        assert passes != before
    assert passes == before
