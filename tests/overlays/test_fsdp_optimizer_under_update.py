"""Megatron-FSDP's optimizers with the overlay: each makes the updates that it makes of a model that is not sharded.

The cases and the neighbours of pack 31 run on releases, in a process of its own for each. The real `fully_shard_optimizer` prepares
every optimizer of torch in this process, for plain parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import assert_witness_and_self_test, placed, stock
from releases import newest
from reproduced_pack import assert_neighbours_are_the_same, assert_repaired, measured_on

from megacpp_overlays.feature_probes.fsdp_optimizer_under_update import COUNTED, TARGET
from megacpp_overlays.overlays.fsdp_optimizer_under_update import OVERLAY

pytestmark = pytest.mark.upstream

FIRST_OF_ADAM = 1.344
"""By how much the first update is too small, where a step of nothing was counted and nothing decayed: torch's usual betas."""

measured = measured_on("31", "0.17.1", "0.18.2", newest(), daily=[newest()], neighbours=True)


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured)


def test_results_that_are_right_without_the_overlay_have_the_same_bits(measured: Any) -> None:
    assert_neighbours_are_the_same(measured)


# In this process


module = stock(TARGET.module)


@pytest.fixture
def seam(module: ModuleType) -> Iterator[ModuleType]:
    with placed(OVERLAY, COUNTED, module):
        yield module


def parameter() -> Any:
    """Return a parameter of a model that gathers nothing."""
    made = torch.nn.Parameter(torch.linspace(0.5, 2.0, 4))
    nothing = {
        name: lambda: None for name in ("finish_grad_sync", "install_optimized_model_weights", "zero_grad_buffer")
    }
    made._megatron_fsdp_model = SimpleNamespace(model_auto_sync=True, **nothing)  # type: ignore[attr-defined]
    return made


def updated(optimizer: Any, steps: int = 3) -> list[Any]:
    """Return the values of the one parameter after each step."""
    ((made,),) = [group["params"] for group in optimizer.param_groups]
    found = []
    for number in range(steps):
        made.grad = torch.tensor([0.3, -0.2, 0.1, 0.7]) * (number + 1)
        optimizer.step()
        found.append(made.detach().clone())
    return found


def prepared(module: ModuleType, optimizer: Any) -> Any:
    return module.fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=False)


def state_of(optimizer: Any) -> list[tuple[list[str], float]]:
    """Return the state that a checkpoint would be loaded into: for each parameter its names and its number of steps."""
    return [(sorted(each), float(each.get("step", 0))) for each in optimizer.state.values()]


EVERY: dict[str, dict[str, Any]] = {
    "Adadelta": {"weight_decay": 0.1},
    "Adagrad": {"weight_decay": 0.1, "initial_accumulator_value": 0.5},
    "Adam": {"weight_decay": 0.1, "amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Adamax": {"weight_decay": 0.1},
    "ASGD": {"weight_decay": 0.1},
    "NAdam": {"weight_decay": 0.1},
    "RAdam": {"weight_decay": 0.1},
    "RMSprop": {"weight_decay": 0.1, "centered": True, "momentum": 0.9},
    "Rprop": {},
    "SGD": {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True},
}


@pytest.mark.parametrize("name", EVERY)
def test_every_optimizer_of_torch_updates_as_without_preparation(seam: ModuleType, name: str) -> None:
    make = getattr(torch.optim, name)
    plain, ours = (make([parameter()], lr=0.25, **EVERY[name]) for _ in range(2))

    prepared(seam, ours)

    before = state_of(ours)
    assert {steps for _, steps in before} == {0.0}
    for one, other in zip(updated(ours), updated(plain), strict=True):
        # Moments of an exponential average of zeros are zero; those of a maximum have an epsilon, as after a step of zeros.
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)
    assert [names for names, _ in state_of(ours)] == [names for names, _ in before]


def test_upstream_makes_adam_s_first_update_too_small(module: ModuleType) -> None:
    plain, theirs = (torch.optim.Adam([parameter()], lr=0.25) for _ in range(2))
    before = parameter().detach()

    prepared(module, theirs)

    ratio = (updated(plain, 1)[0] - before) / (updated(theirs, 1)[0] - before)
    assert torch.allclose(ratio, torch.tensor(FIRST_OF_ADAM), atol=1e-3)


def test_settings_keep_their_values_and_a_tensor_among_them_is_the_same_one(seam: ModuleType) -> None:
    rate = torch.tensor(0.25)
    optimizer = torch.optim.AdamW([parameter()], lr=rate, weight_decay=0.1, foreach=False)
    before = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}

    prepared(seam, optimizer)

    after = optimizer.param_groups[0]
    assert after["lr"] is rate
    assert float(rate) == 0.25
    assert {key: value for key, value in after.items() if key != "params"} == before


class CountingOptimizer(torch.optim.Optimizer):
    """Counts in its group, as fused Adam does, in numbers or tensors, and has a schedule of its own there."""

    def __init__(self, params: Any, *, of_tensors: bool = False) -> None:
        super().__init__(params, {"weight_decay": 0.1, "schedule": torch.zeros(())})
        self.of_tensors = of_tensors

    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            first = torch.zeros(()) if self.of_tensors else 0
            group["step"] = group.get("step", first) + 1
            group["schedule"] += 0.5
            for each in group["params"]:
                self.state[each]["step"] = self.state[each].get("step", first) + 1


@pytest.mark.parametrize("of_tensors", [True, False])
def test_counters_and_schedules_of_a_group_begin_with_the_first_step(seam: ModuleType, of_tensors: bool) -> None:
    optimizer = CountingOptimizer([parameter()], of_tensors=of_tensors)
    schedule = optimizer.param_groups[0]["schedule"]

    prepared(seam, optimizer)

    group = optimizer.param_groups[0]
    assert group["schedule"] is schedule
    ((state,),) = [list(optimizer.state.values())]
    assert [float(each) for each in (schedule, group["step"], state["step"])] == [0.0, 0.0, 0.0]
    assert isinstance(state["step"], torch.Tensor if of_tensors else int)
    optimizer.step()
    assert [float(each) for each in (schedule, group["step"], state["step"])] == [0.5, 1.0, 1.0]


def test_state_that_was_there_already_is_kept(seam: ModuleType) -> None:
    """As of an optimizer that was loaded before."""
    plain, ours = (torch.optim.AdamW([parameter()], lr=0.25, weight_decay=0.1) for _ in range(2))
    for each in (plain, ours):
        updated(each)

    prepared(seam, ours)

    assert [float(each["step"]) for each in ours.state.values()] == [3.0]
    assert all(map(torch.equal, updated(ours), updated(plain)))


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step:UserWarning")  # torch warns of upstream's own step
def test_a_scheduler_that_was_there_already_follows_the_optimizer(seam: ModuleType) -> None:
    plain, ours = (torch.optim.AdamW([parameter()], lr=0.25, weight_decay=0.1) for _ in range(2))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (plain, ours)]

    prepared(seam, ours)

    assert all(map(torch.equal, updated(ours), updated(plain)))
    for each in schedules:
        each.step()
    assert ours.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 0.125
    assert all(map(torch.equal, updated(ours), updated(plain)))


@pytest.mark.parametrize("scheduled", [True, False])
def test_an_optimizer_that_upstream_refuses_keeps_its_own_step(seam: ModuleType, scheduled: bool) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.25)
    if scheduled:
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = vars(optimizer).get("step")

    with pytest.raises(ValueError, match="MegatronFSDP"):
        prepared(seam, optimizer)

    assert vars(optimizer).get("step") is before
    assert (before is None) is not scheduled


def test_settings_are_put_back_where_the_step_raises(seam: ModuleType) -> None:
    class RaisingOptimizer(CountingOptimizer):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("no step")

    optimizer = RaisingOptimizer([parameter()])

    with pytest.raises(RuntimeError, match="no step"):
        prepared(seam, optimizer)

    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    assert_witness_and_self_test(OVERLAY, module, COUNTED)


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda optimizer: optimizer.param_groups[0].update(lr=0.0),
        lambda optimizer: optimizer.param_groups[0].update(step=1),
        lambda optimizer: next(iter(optimizer.state.values()))["sum"].add_(1.0),
        lambda optimizer: optimizer.state.clear(),
        lambda optimizer: vars(optimizer).pop("step"),
    ],
    ids=["the rate", "the count of the group", "a moment", "the state", "the step"],
)
def test_a_change_of_any_part_of_it_fails_the_self_test(seam: ModuleType, spoilt: Callable[[Any], Any]) -> None:
    right = seam.fully_shard_optimizer

    def spoiling(optimizer: Any, **how: Any) -> Any:
        right(optimizer, **how)
        spoilt(optimizer)
        return optimizer

    seam.fully_shard_optimizer = spoiling
    try:
        assert OVERLAY.self_test(seam).broken
    finally:
        seam.fully_shard_optimizer = right
