"""Megatron-FSDP with the overlay: gradients that are not sharded are reduced once, before the step, where reduction does not overlap.

The case of pack 57 runs on releases, each in a process of its own. Further tests call the pipeline in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from placed_seams import assert_self_test, placed, stock
from releases import newest
from reproduced_pack import assert_repaired, measured_on

from megacpp_overlays.feature_probes.fsdp_reduced_twice import CLASS, METHOD, OPTIMIZER, TARGET, TWICE
from megacpp_overlays.overlays.fsdp_reduced_twice import OVERLAY

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore::UserWarning")]

NEWEST = newest()
measured = measured_on("57", "0.16.1", "0.17.1", "0.18.2", NEWEST, daily=[NEWEST])


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured)


# In this process: gradients that hooks of the newest release reduce


module = stock(TARGET.module)


def reduces(reduce: Callable[..., None], strategy: str, *, overlap: bool = False, hybrid: bool = False) -> bool:
    """Return whether the function that hooks call reduces gradients of a model."""
    settings = SimpleNamespace(overlap_grad_reduce=overlap, data_parallel_sharding_strategy=strategy)
    index = SimpleNamespace(use_hybrid_fsdp=hybrid)
    pipeline = SimpleNamespace(buffer=SimpleNamespace(ddp_config=settings, dist_index=index))
    seen: list[Any] = []

    def parameters() -> Iterator[Any]:
        seen.append(None)
        yield from ()

    reduce(pipeline, parameters(), outer_fsdp_group_grad_reduce=hybrid)
    return bool(seen)


def test_the_self_test_sees_whether_hooks_reduce(module: ModuleType) -> None:
    assert_self_test(OVERLAY, module, TWICE)


@pytest.mark.parametrize(
    ("shape", "strategies"), [(TWICE, {"optim", "no_shard"}), (OPTIMIZER, {"optim"})], ids=[TWICE, OPTIMIZER]
)
def test_hooks_leave_gradients_that_are_reduced_before_the_step(
    module: ModuleType, shape: str, strategies: set[str]
) -> None:
    every = ("no_shard", "optim", "optim_grads", "optim_grads_params")
    (seam,) = OVERLAY.replacements[shape]
    made = seam.make(getattr(getattr(module, CLASS), METHOD), module)

    assert {each for each in every if not reduces(made, each)} == strategies


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@pytest.mark.parametrize("given", [{"overlap": True}, {"hybrid": True}], ids=["overlapping", "over outer ranks"])
def test_hooks_reduce_gradients_that_nothing_else_reduces(
    module: ModuleType, strategy: str, given: dict[str, bool]
) -> None:
    with placed(OVERLAY, TWICE, module):
        assert reduces(getattr(getattr(module, CLASS), METHOD), strategy, **given)
