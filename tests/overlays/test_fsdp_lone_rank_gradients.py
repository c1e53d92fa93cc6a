"""Megatron-FSDP with the overlay: gradients that one rank reduces are scaled once, and added up once, over any number of microbatches.

Cases of pack 56 run on releases, each in a process of its own. Further tests call both functions in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from placed_seams import placed, without_overlays
from releases import newest
from reproduced_pack import assert_repaired, measured_on

from megacpp_overlays.feature_probes.fsdp_lone_rank_gradients import CLASS, IN_PLACE, METHOD, SCALE, TARGET
from megacpp_overlays.overlays.fsdp_lone_rank_gradients import OVERLAY, observe

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore::UserWarning")]

NEWEST = newest()
measured = measured_on("56", "0.16.1", "0.17.1", "0.18.2", NEWEST, daily=[NEWEST])


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured, may_be_blocked={"hybrid-cpu"})  # which 0.16 cannot be asked


# In this process: which buffers of the newest release become a shard, and how their gradients are scaled


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """The newest release without any overlay, whose own method makes no buffers."""
    with without_overlays(TARGET.module) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(getattr(found, CLASS), METHOD, lambda self, *_, **__: None)
        yield found


def buffer(*, ranks: int = 1, sharded: bool = False, factor: float | None = 0.5) -> Any:
    """A gradient buffer of so many ranks."""
    return SimpleNamespace(dp_world_size=ranks, is_data_distributed=sharded, gradient_scaling_factor=factor)


def made(module: ModuleType, *buffers: Any, strategy: str = "optim_grads_params", outer: str = "no_shard") -> None:
    """Call the seam on the buffers of a model."""
    settings = SimpleNamespace(data_parallel_sharding_strategy=strategy, outer_dp_sharding_strategy=outer)
    groups = [SimpleNamespace(main_grad_buffer=each) for each in buffers]
    model = SimpleNamespace(ddp_config=settings, parameter_groups=groups)
    with placed(OVERLAY, IN_PLACE, module):
        getattr(getattr(module, CLASS), METHOD)(model, {})


def scaled(module: ModuleType, factor: Any, **settings: bool) -> tuple[float, Any]:
    """Return the value of a gradient of 1 after the module has scaled it, and the operation that reduces it."""
    import torch

    gradient = torch.ones(1)
    chosen = {"average_in_collective": False, "gradient_reduce_div_fusion": False, **settings}
    how = getattr(module, SCALE)(gradient, factor, SimpleNamespace(**chosen))
    return gradient.item(), how


def test_the_self_test_sees_whether_gradients_of_one_rank_are_scaled(module: ModuleType) -> None:
    assert observe(module).broken
    with placed(OVERLAY, IN_PLACE, module):
        assert not observe(module).broken
    assert observe(module).broken


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("factor", [0.5, None], ids=["means", "sums"])
def test_a_buffer_of_one_rank_becomes_its_own_shard(module: ModuleType, strategy: str, factor: float | None) -> None:
    lone = buffer(factor=factor)

    made(module, lone, None, strategy=strategy)

    assert lone.is_data_distributed
    assert lone.gradient_scaling_factor == factor


@pytest.mark.parametrize("each", [buffer(ranks=2, sharded=True), buffer(ranks=2)], ids=["sharded", "not sharded"])
def test_a_buffer_of_more_ranks_stays_as_it_is(module: ModuleType, each: Any) -> None:
    before = vars(each).copy()

    made(module, each)

    assert vars(each) == before
    assert type(each.gradient_scaling_factor) is float


@pytest.mark.parametrize(
    "settings",
    [{"strategy": "optim"}, {"strategy": "no_shard"}, {"outer": "optim"}],
    ids=["a sharded optimizer", "nothing sharded", "sharded over outer ranks, too"],
)
def test_other_strategies_are_upstreams(module: ModuleType, settings: dict[str, str]) -> None:
    lone = buffer()

    made(module, lone, **settings)

    assert not lone.is_data_distributed


@pytest.mark.parametrize("setting", ["average_in_collective", "gradient_reduce_div_fusion", "bucket_size"])
def test_gradients_of_one_rank_are_scaled_before_they_are_reduced(module: ModuleType, setting: str) -> None:
    import torch

    lone = buffer()
    made(module, lone)

    with placed(OVERLAY, IN_PLACE, module):
        found = scaled(module, lone.gradient_scaling_factor, **{setting: True})

    assert found == (0.5, torch.distributed.ReduceOp.SUM)


@pytest.mark.parametrize("setting", ["average_in_collective", "bucket_size"])
@pytest.mark.parametrize("factor", [0.5, None], ids=["means", "sums"])
def test_gradients_of_more_ranks_are_scaled_as_before(module: ModuleType, setting: str, factor: float | None) -> None:
    without = scaled(module, factor, **{setting: True})

    with placed(OVERLAY, IN_PLACE, module):
        assert scaled(module, factor, **{setting: True}) == without
