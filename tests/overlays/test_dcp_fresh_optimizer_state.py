"""Fresh optimizers with the overlay: a distributed checkpoint that asks for their state changes none of their steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from placed_seams import assert_same_bits, assert_self_test, placed, stock, without_overlays
from places import ROOT
from reproduced_pack import assert_repaired, reproduced_in
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from megacpp_overlays.feature_probes.dcp_fresh_optimizer_state import STEPPED, TARGET
from megacpp_overlays.overlays.dcp_fresh_optimizer_state import OVERLAY
from megacpp_overlays.repro import beside, neighbour

pytestmark = pytest.mark.upstream

FOLDER = ROOT / "packs/59-dcp-fresh-optimizer-state"
PACK = beside(str(FOLDER / "neighbours.py"))


@pytest.mark.parametrize("lane", ["current", "edge"])
def test_a_release_is_broken_without_the_overlay_and_right_with_it(lane: str) -> None:
    assert_repaired(reproduced_in(lane, "59"))


# In this process


module = stock(TARGET.module)


@pytest.fixture(scope="module")
def repaired(module: ModuleType) -> Iterator[ModuleType]:
    """The module with the seam, for the rest of the file."""
    with placed(OVERLAY, STEPPED, module):
        yield module


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    assert_self_test(OVERLAY, module, STEPPED)


@pytest.mark.parametrize("each", neighbour.load(FOLDER), ids=lambda each: each.name)
def test_results_that_are_right_without_the_overlay_have_the_same_bits(
    each: neighbour.Neighbour, module: ModuleType
) -> None:
    assert_same_bits(each, OVERLAY, module, STEPPED)


DECAY = st.sampled_from([0.0, 0.1])
OPTIMIZERS = st.one_of(
    st.tuples(
        st.sampled_from(["Adam", "AdamW"]),
        st.fixed_dictionaries({"weight_decay": DECAY, "amsgrad": st.booleans(), "foreach": st.booleans()}),
    ),
    st.tuples(
        st.sampled_from(["NAdam", "RAdam", "ASGD", "Adadelta", "Adamax", "RMSprop"]),
        st.fixed_dictionaries({"weight_decay": DECAY, "maximize": st.booleans(), "foreach": st.booleans()}),
    ),
    st.tuples(st.just("SGD"), st.fixed_dictionaries({"weight_decay": DECAY, "momentum": st.sampled_from([0.0, 0.9])})),
    st.tuples(st.sampled_from(["Rprop", "Adafactor", "Adagrad"]), st.just({})),
)


def steps_of(name: str, options: Mapping[str, Any], *, asks: bool) -> list[Any]:
    """Return the weights after each of three steps, with two groups of different rates."""
    model, optimizer = PACK.made(name, **options)
    bias = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [bias], "lr": 0.02})
    if asks:
        get_optimizer_state_dict(model, optimizer)
    found = []
    for number in range(3):
        PACK.step(model, optimizer, number)
        found.append(torch.cat([each.detach().flatten().clone() for each in model.parameters()]))
    return found


@given(chosen=OPTIMIZERS)
def test_steps_have_the_same_bits_as_if_nothing_had_asked(
    repaired: ModuleType, chosen: tuple[str, dict[str, Any]]
) -> None:
    for without, asked in zip(steps_of(*chosen, asks=False), steps_of(*chosen, asks=True), strict=True):
        torch.testing.assert_close(asked, without, rtol=0, atol=0)


def test_a_checkpoint_that_is_loaded_into_the_state_is_in_the_optimizer(repaired: ModuleType) -> None:
    """DCP loads into the tensors that it was given, and not every launcher sets the state afterwards."""
    model, optimizer = PACK.made()
    found = get_optimizer_state_dict(model, optimizer)
    found["state"]["weight"]["step"].fill_(7.0)

    assert optimizer.state[model.weight]["step"].item() == 7.0


def test_state_that_a_partial_checkpoint_lacks_is_fresh(repaired: ModuleType) -> None:
    saved = get_optimizer_state_dict(*PACK.made())
    model, optimizer = PACK.made("Adam")
    del saved["state"]["bias"]
    saved["state"]["weight"]["step"].fill_(7.0)
    set_optimizer_state_dict(model, optimizer, saved, options=repaired.StateDictOptions(strict=False))

    assert optimizer.state[model.weight]["step"].item() == 7.0
    assert not optimizer.state.get(model.bias) or optimizer.state[model.bias]["step"].item() == 0.0


class CountsInGroups(torch.optim.Optimizer):
    """An optimizer that counts steps of a group in the group, as fused ones outside of torch do."""

    def __init__(self, parameters: Any, counter: Any = None) -> None:
        super().__init__(parameters, {"lr": 0.1, **({} if counter is None else {"step": counter})})

    def step(self, closure: Any = None) -> None:  # type: ignore[override] # as upstream's subclasses
        """Count the step and create state."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for each in group["params"]:
                self.state[each]["moment"] = torch.zeros_like(each)


@pytest.mark.parametrize(("counter", "expected"), [(None, 0), (0, 0), (5, 6)])
def test_a_counter_in_a_group_is_zero_unless_it_has_counted(
    repaired: ModuleType, counter: int | None, expected: int
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = CountsInGroups(model.parameters(), counter)

    get_optimizer_state_dict(model, optimizer)

    assert [group["step"] for group in optimizer.param_groups] == [expected]


def test_a_counter_that_is_a_number_stays_one(repaired: ModuleType) -> None:
    class Counts(CountsInGroups):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for each in group["params"]:
                    self.state[each]["step"] = self.state[each].get("step", 0) + 1

    model = torch.nn.Linear(2, 2)
    optimizer = Counts(model.parameters())
    get_optimizer_state_dict(model, optimizer)

    assert [type(each["step"]) for each in optimizer.state.values()] == [int, int]
    assert [each["step"] for each in optimizer.state.values()] == [0, 0]


def test_an_optimizer_that_refuses_a_step_keeps_its_weight_decay(repaired: ModuleType) -> None:
    model, optimizer = PACK.made("AdamW", weight_decay=0.25)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("refused")

    optimizer.step = refuse
    with pytest.raises(RuntimeError, match="refused"):
        get_optimizer_state_dict(model, optimizer)

    assert optimizer.param_groups[0]["weight_decay"] == 0.25


def test_rates_of_complex_weights_begin_as_upstreams() -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    plain, asked = (torch.optim.Rprop([weight], lr=0.5, foreach=False) for _ in range(2))
    weight.grad = torch.zeros_like(weight)
    plain.step()
    weight.grad = None

    with without_overlays(TARGET.module) as found, placed(OVERLAY, STEPPED, found):
        getattr(found, TARGET.symbol)(asked)

    torch.testing.assert_close(asked.state[weight]["step_size"], plain.state[weight]["step_size"])
