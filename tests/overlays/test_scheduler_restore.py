"""Restored schedules with the overlay: steps, learning rates and weight decay are those of the run that saved them.

Cases of pack 48 run on releases, in a process of its own for each; everything else runs on the newest one in this process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from placed_seams import assert_same_bits, assert_self_test, placed, stock
from places import ROOT
from releases import newest
from reproduced_pack import assert_repaired, measured_on

from megacpp_overlays.feature_probes.scheduler_restore import ADDED, ADDED_EARLY, CLASS, TARGET
from megacpp_overlays.overlays.scheduler_restore import OVERLAY
from megacpp_overlays.repro import beside, neighbour

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore:Could not determine rank:UserWarning")]

FOLDER = ROOT / "packs/48-scheduler-restore"
PACK = beside(str(FOLDER / "neighbours.py"))
CHECKED = {"use_checkpoint_opt_param_scheduler": False}
STEPS = st.integers(0, 1100)
ARGUMENTS = st.fixed_dictionaries(
    {
        "lr_decay_style": st.sampled_from(["cosine", "linear", "constant", "inverse-square-root"]),
        "lr_warmup_steps": st.integers(0, 50),
        "max_lr": st.floats(1e-3, 1.0),
        "end_wd": st.floats(0.0, 1.0),
        "wd_incr_style": st.sampled_from(["cosine", "linear"]),
    }
)


measured = measured_on("48", "0.12.0", "0.16.1", newest())


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured)


# In this process


module = stock(TARGET.module)


@pytest.fixture(scope="module")
def restoring(module: ModuleType) -> Iterator[ModuleType]:
    """The newest release with the seam, for the rest of the file."""
    with placed(OVERLAY, ADDED_EARLY, module):
        yield module


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    assert_self_test(OVERLAY, module, ADDED, ADDED_EARLY)


def test_the_newest_release_is_broken_without_the_overlay_and_right_with_it(module: ModuleType) -> None:
    assert all(case.run().broken for case in PACK.CASES)
    with placed(OVERLAY, ADDED_EARLY, module):
        assert not any(case.run().broken for case in PACK.CASES)


@pytest.mark.parametrize("each", neighbour.load(FOLDER), ids=lambda each: each.name)
def test_results_that_are_right_without_the_overlay_have_the_same_bits(
    each: neighbour.Neighbour, module: ModuleType
) -> None:
    assert_same_bits(each, OVERLAY, module, ADDED_EARLY)


@given(saved=STEPS, used=STEPS, more=STEPS, arguments=ARGUMENTS, other=ARGUMENTS)
def test_a_restored_schedule_goes_on_as_the_one_that_was_saved(
    restoring: ModuleType, saved: int, used: int, more: int, arguments: Mapping[str, Any], other: Mapping[str, Any]
) -> None:
    straight, restored = PACK.scheduler(saved, **arguments), PACK.scheduler(used, **other)
    state = straight.state_dict()

    for _ in range(2):
        restored.load_state_dict(state)
        assert PACK.rates(restored) == PACK.rates(straight)
        assert restored.state_dict() == state
    for each in (straight, restored):
        each.step(more)
    assert PACK.rates(restored) == PACK.rates(straight)


@given(saved=STEPS, used=STEPS, arguments=ARGUMENTS)
def test_an_overridden_schedule_is_that_of_its_arguments_at_the_saved_step(
    restoring: ModuleType, saved: int, used: int, arguments: Mapping[str, Any]
) -> None:
    made = PACK.scheduler(used, **arguments, **CHECKED, override_opt_param_scheduler=True)

    made.load_state_dict(PACK.scheduler(saved).state_dict())

    assert PACK.rates(made) == PACK.rates(PACK.scheduler(saved, **arguments))


@given(used=STEPS, refused=st.sampled_from(["lr_decay_style", *PACK.LR.keys() - {"init_lr"}, *PACK.DECAY]))
def test_a_state_that_upstream_refuses_leaves_the_schedule_as_it_was(
    restoring: ModuleType, used: int, refused: str
) -> None:
    made = PACK.scheduler(used, **CHECKED)
    before, rates = dict(vars(made)), PACK.rates(made)
    saved = PACK.scheduler(PACK.SAVED).state_dict()

    with pytest.raises(KeyError):
        made.load_state_dict({key: value for key, value in saved.items() if key != "min_lr"})
    assert (vars(made), PACK.rates(made)) == (before, rates)

    group, *_ = made.optimizer.param_groups
    group["lr"] = 7.0  # a caller's, off the schedule
    with pytest.raises(AssertionError, match="do not match"):
        made.load_state_dict({**saved, refused: "other"})
    assert vars(made) == before
    assert group["lr"] == 7.0 or refused in PACK.DECAY  # upstream has set it before it asks for those


def test_a_learning_rate_that_is_a_tensor_stays_that_tensor(restoring: ModuleType) -> None:
    """A CUDA graph reads it where it is."""
    straight, made = PACK.scheduler(PACK.SAVED), PACK.scheduler(PACK.LATER)
    tensors = [torch.zeros((), dtype=torch.float64) for _ in PACK.GROUPS]
    for group, tensor in zip(made.optimizer.param_groups, tensors, strict=True):
        group["lr"] = tensor

    made.load_state_dict(straight.state_dict())

    assert all(group["lr"] is tensor for group, tensor in zip(made.optimizer.param_groups, tensors, strict=True))
    assert PACK.rates(made) == PACK.rates(straight)


def test_a_subclass_that_calls_upstream_is_restored(restoring: ModuleType) -> None:
    class CountingScheduler(getattr(restoring, CLASS)):
        taken = 0

        def step(self, increment: int) -> None:
            self.taken += increment
            super().step(increment)

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            self.taken = state_dict["taken"]

    arguments = {"lr_decay_style": "cosine", **PACK.LR, **PACK.DECAY}
    made = CountingScheduler(SimpleNamespace(param_groups=[{}]), **arguments)
    made.step(PACK.LATER)
    made.load_state_dict({**PACK.scheduler(PACK.SAVED).state_dict(), "taken": 7})

    assert (made.num_steps, made.taken) == (PACK.SAVED, 7)


def test_a_seam_on_a_repair_or_on_another_seam_changes_nothing(restoring: ModuleType) -> None:
    straight, made = PACK.scheduler(PACK.SAVED), PACK.scheduler(PACK.LATER)
    ((replacement,),) = {*OVERLAY.replacements.values()}

    def repaired(self: Any, state_dict: Any) -> None:
        self.num_steps = state_dict["num_steps"]
        self.step(0)

    for original in (repaired, getattr(restoring, CLASS).load_state_dict):
        replacement.make(original, restoring)(made, straight.state_dict())
        assert PACK.rates(made) == PACK.rates(straight)
        made.step(PACK.LATER)
