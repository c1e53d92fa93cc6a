"""Optimizer state of frozen parameters with the overlay: it is loaded as it was saved, and parameters are frozen as before."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from placed_seams import assert_same_bits, assert_self_test, placed, stock
from places import ROOT
from reproduced_pack import assert_repaired, reproduced_in

from megacpp_overlays.feature_probes.dcp_frozen_optimizer_state import DROPPED, TARGET
from megacpp_overlays.overlays.dcp_frozen_optimizer_state import OVERLAY
from megacpp_overlays.repro import beside, neighbour

pytestmark = pytest.mark.upstream

FOLDER = ROOT / "packs/75-dcp-frozen-optimizer-state"
PACK = beside(str(FOLDER / "neighbours.py"))
OPTIMIZERS = st.sampled_from(["AdamW", "NAdam", "RAdam", "Adagrad", "Adamax", "RMSprop", "Rprop"])


@pytest.mark.parametrize("lane", ["current", "edge"])
def test_a_release_is_broken_without_the_overlay_and_right_with_it(lane: str) -> None:
    assert_repaired(reproduced_in(lane, "75"))


# In this process


module = stock(TARGET.module)


@pytest.fixture(scope="module")
def repaired(module: ModuleType) -> Iterator[ModuleType]:
    """The module with the seam, for the rest of the file."""
    with placed(OVERLAY, DROPPED, module):
        yield module


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    assert_self_test(OVERLAY, module, DROPPED)


@pytest.mark.parametrize("each", neighbour.load(FOLDER), ids=lambda each: each.name)
def test_results_that_are_right_without_the_overlay_have_the_same_bits(
    each: neighbour.Neighbour, module: ModuleType
) -> None:
    assert_same_bits(each, OVERLAY, module, DROPPED)


@given(name=OPTIMIZERS, form=st.sampled_from(list(PACK.FORMS.values())), trained=st.booleans())
def test_steps_after_a_thaw_are_those_of_a_run_that_was_not_interrupted(
    repaired: ModuleType, name: str, form: dict[str, Any], trained: bool
) -> None:
    """Three steps of both layers, two of the second one alone, two of both; the second run is saved and loaded before the middle part."""
    found = []
    for restarts in (False, True):
        model, optimizer = PACK.made(name=name)
        for number in range(3):
            PACK.step(model, optimizer, number)
        model[0].requires_grad_(False)
        if restarts:
            options = repaired.StateDictOptions(**form)
            saved = repaired.get_optimizer_state_dict(model, optimizer, options=options)
            weights = model.state_dict()
            model, optimizer = PACK.made(learns=False, name=name)
            if trained:
                PACK.step(model, optimizer, 9)
            model.load_state_dict(weights)
            repaired.set_optimizer_state_dict(model, optimizer, saved, options=options)
        optimizer.zero_grad()
        for number in (3, 4):
            PACK.step(model, optimizer, number)
        model[0].requires_grad_(True)
        for number in (5, 6):
            PACK.step(model, optimizer, number)
        found.append(torch.cat([each.detach().flatten() for each in model.parameters()]))

    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("form", PACK.FORMS.values(), ids=list(PACK.FORMS))
@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
def test_a_load_changes_no_weight_and_leaves_frozen_parameters_frozen(
    repaired: ModuleType, form: dict[str, Any], trained: bool
) -> None:
    *_, saved = PACK.saved(**form)
    model, optimizer = PACK.made(learns=False, weight_decay=0.5)
    if trained:
        PACK.step(model, optimizer)
        optimizer.zero_grad()
    before = [each.detach().clone() for each in model.parameters()]

    repaired.set_optimizer_state_dict(model, optimizer, saved, options=repaired.StateDictOptions(**form))

    assert [each.requires_grad for each in model.parameters()] == [False, False, True, True]
    assert all(each.grad is None for each in model.parameters())
    assert all(map(torch.equal, before, model.parameters()))
    assert [len(group["params"]) for group in optimizer.param_groups] == [4]


def test_a_load_that_fails_leaves_frozen_parameters_frozen(repaired: ModuleType) -> None:
    *_, saved = PACK.saved()
    model, optimizer = PACK.made(learns=False)
    del saved["state"]["1.bias"]
    with pytest.raises(RuntimeError, match=r"1\.bias"):
        repaired.set_optimizer_state_dict(model, optimizer, saved)

    assert [each.requires_grad for each in model.parameters()] == [False, False, True, True]


def test_quantized_parameters_are_left_as_upstream_leaves_them(repaired: ModuleType) -> None:
    *_, saved = PACK.saved()
    model, _ = PACK.made()
    model[0].weight = torch.nn.Parameter(torch.zeros(PACK.WIDTH, PACK.WIDTH, dtype=torch.int8), requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    repaired.set_optimizer_state_dict(model, optimizer, saved)

    assert model[0].weight not in optimizer.state
    assert model[0].bias in optimizer.state


def test_a_frozen_weight_that_two_layers_share_has_its_state_once(repaired: ModuleType) -> None:
    found = []
    for form in PACK.FORMS.values():
        options = repaired.StateDictOptions(**form)
        model, optimizer = PACK.made()
        model[0].weight = model[1].weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        PACK.step(model, optimizer)
        saved = repaired.get_optimizer_state_dict(model, optimizer, options=options)
        other, _ = PACK.made()
        other[0].weight = other[1].weight
        other[0].weight.requires_grad_(False)
        restored = torch.optim.AdamW(other.parameters(), lr=0.01)
        repaired.set_optimizer_state_dict(other, restored, saved, options=options)
        found.append(torch.equal(PACK.numbers(model, optimizer), PACK.numbers(other, restored)))

    assert found == [True] * len(PACK.FORMS)
