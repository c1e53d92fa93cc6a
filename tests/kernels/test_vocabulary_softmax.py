"""The passes over a block of logits: those in PyTorch against autograd, those in Triton against float64.

Triton works in its interpreter, on the CPU. The tests also compile its programs for their devices;
their results there are tested in tests/gpu.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import compiled_programs
import kept_answers
import pytest
import torch
import warm_python
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from releases import only
from vocabulary_softmax_cases import CASES, EXTRAS, FEW, TOKENS, Case, draw, run, truth

from megacpp_overlays.kernels.vocabulary_softmax import in_torch as vocabulary_softmax_torch
from megacpp_overlays.kernels.vocabulary_softmax import passes as vocabulary_softmax
from megacpp_overlays.kernels.vocabulary_softmax.numbers import Coefficients, Statistics
from megacpp_overlays.kernels.vocabulary_softmax.passes import room_for_statistics

ARCHITECTURES = ("80", "90", "100", "120")
SHARED = 48 * 2**10
"""Bytes of shared memory that a program gets anywhere without asking for more."""
ROOM = 16
"""Bytes that a thread may keep outside of its registers on Hopper, where alone tokens are skipped.

A block of 8192 classes, as wide rows have without a selection, took 120, and the pass twice the time.
"""
ROUNDING = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 5e-3}
"""Largest relative error of a gradient, by the dtype that it is written in."""


# In PyTorch


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 6),
    widths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    options=st.fixed_dictionaries(
        {
            "bias": st.booleans(),
            "class_weight": st.booleans(),
            "spread": st.booleans(),
            "softcap": st.sampled_from([None, 0.7, 30.0]),
            "in_place": st.booleans(),
            "padding": st.integers(0, 3),
            "first_class": st.sampled_from([0, 1000]),
        }
    ),
)
def test_blocks_add_up_to_log_sum_exp_label_and_spread_and_give_their_gradient(
    seed: int, tokens: int, widths: list[int], options: dict[str, Any]
) -> None:
    case = Case(tokens=tokens, widths=tuple(widths), **options)
    block = draw(case, seed)

    seen = truth(case, block)

    leaf = block.logits.double().requires_grad_()
    values = leaf if block.bias is None else leaf + block.bias.double()
    if case.softcap is not None:
        values = case.softcap * torch.tanh(values / case.softcap)
    column = block.labels - case.first_class
    here = (column >= 0) & (column < case.classes)
    own = torch.where(here, values.gather(1, torch.where(here, column, 0).unsqueeze(1)).squeeze(1), 0.0)
    lse = torch.logsumexp(values, dim=1)
    total = (block.of_probability * lse - block.of_label * own).sum()
    if block.of_spread is not None:
        weights = 1.0 if block.class_weight is None else block.class_weight.double()
        spread = (values * weights).sum(dim=1)
        total = total - (block.of_spread * spread).sum()
        torch.testing.assert_close(seen["spread_logits"], spread.detach())
    torch.testing.assert_close(seen["lse"], lse.detach())
    torch.testing.assert_close(seen["label_logit"], own.detach())
    torch.testing.assert_close(seen["maximum"], values.detach().amax(dim=1))
    torch.testing.assert_close(seen["gradient"], torch.autograd.grad(total, leaf)[0])


def test_a_token_without_coefficients_has_no_gradient_if_its_logits_are_not_finite() -> None:
    logits = torch.tensor([[float("nan"), float("inf")], [1.0, 1.0]])
    zeros, ones = torch.tensor([0.0, 0.0]), torch.tensor([0.0, 1.0])
    coefficients = Coefficients(torch.tensor([float("nan"), 1.0]), ones, zeros, zeros)

    vocabulary_softmax.logits_gradient(logits, torch.tensor([0, 0]), 0, coefficients, logits)

    assert logits.tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_a_token_that_is_smoothed_alone_has_a_gradient() -> None:
    """Label smoothing 1.0 with class weights of 0: neither probability nor label counts."""
    out = torch.empty(1, 2)
    coefficients = Coefficients(*torch.zeros(3, 1).unbind(), torch.ones(1))

    vocabulary_softmax.logits_gradient(torch.ones(1, 2), torch.tensor([0]), 0, coefficients, out)

    assert out.tolist() == [[-1.0, -1.0]]


@pytest.mark.parametrize("spread", [False, True])
def test_room_has_one_row_for_each_running_number(spread: bool) -> None:
    room = room_for_statistics(7, torch.device("cpu"), torch.float64, spread=spread)

    assert [None if each is None else (each.shape, each.dtype) for each in room] == [
        *[((7,), torch.float64)] * 3,
        ((7,), torch.float64) if spread else None,
    ]


def test_numbers_that_do_not_fit_into_an_exponential_do_not_overflow() -> None:
    logits = torch.tensor([[1e30, -1e30], [-1e30, -1e30], [700.0, 699.0]])
    running = room_for_statistics(3, torch.device("cpu"))

    for block in (0, 1):
        part = logits[:, block : block + 1]
        vocabulary_softmax.add_statistics(part, torch.tensor([0, 1, 0]), block, running, first=block == 0)

    assert running.accumulate.tolist() == pytest.approx([1.0, 2.0, 1.0 + torch.tensor(-1.0).exp().item()])
    assert running.maximum.tolist() == logits.amax(dim=1).tolist()


def test_losses_of_tokens_that_count_are_the_log_of_the_sum_less_the_label() -> None:
    statistics = Statistics(torch.tensor([1.0, 2.0, float("inf")]), torch.ones(3), torch.tensor([0.5, 5.0, 0.0]))
    labels = torch.tensor([3, -100, 7])

    losses = vocabulary_softmax.plain_losses(statistics, labels, 7)

    assert losses.tolist() == [0.5, -3.0, 0.0]


def test_the_gradient_of_an_ignored_token_is_not_read() -> None:
    statistics = Statistics(torch.tensor([1.0, 2.0]), torch.ones(2), torch.zeros(2))
    arriving = torch.tensor([4.0, float("nan")], dtype=torch.bfloat16)

    found = vocabulary_softmax.plain_coefficients(statistics, torch.tensor([0, 7]), 7, arriving)

    assert [each.tolist() for each in found[:3]] == [[1.0, 2.0], [4.0, 0.0], [4.0, 0.0]]
    assert found.of_spread is None
    assert found.of_probability.dtype == torch.float32


def test_a_host_without_triton_computes_in_pytorch(run_python: Callable[..., Any]) -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
from megacpp_overlays.kernels.vocabulary_softmax import in_torch as vocabulary_softmax_torch, passes as vocabulary_softmax
from megacpp_overlays.kernels.linear_cross_entropy import linear_cross_entropy
print(vocabulary_softmax._passes(torch.zeros(1)) is vocabulary_softmax_torch)
print(float(linear_cross_entropy(torch.zeros(2, 2), torch.zeros(4, 2), torch.tensor([0, 1])).exp()))
"""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = run_python(
        code, ROOT, after=warm_python.TORCH, MEGACPP_OVERLAYS_LOG="logging", TRITON_INTERPRET="1", PYTHONPATH=path
    )

    here, perplexity = done.stdout.splitlines()
    assert here == "True"
    assert float(perplexity) == pytest.approx(4.0)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.tokens and case.classes < 10_000])
def test_pytorch_in_float32_agrees_with_float64(name: str) -> None:
    """So the cases of the interpreter are cases, and narrowing in place is right here too."""
    case = CASES[name]
    block = draw(case)

    seen, true = run(case, block, vocabulary_softmax_torch), truth(case, block)

    size = float(true["gradient"].norm()) or 1.0
    assert float((seen["gradient"].double() - true["gradient"]).norm()) / size < ROUNDING[case.out]


# In Triton


@pytest.fixture(scope="module")
def facts(grid_size: str) -> Any:
    """Return the results of `vocabulary_softmax_facts.py`. No kernel runs on a device."""
    pytest.importorskip("triton")
    return kept_answers.answer("vocabulary_softmax_facts.py", grid_size, TRITON_INTERPRET="1")


@pytest.mark.parametrize("name", only(CASES, FEW))
def test_triton_agrees_with_float64(facts: Any, name: str) -> None:
    found = facts["cases"][name]

    assert {each: far for each, far in found.items() if each != "gradient" and not far < ROUNDING["float32"]} == {}
    assert found["gradient"] < ROUNDING[CASES[name].out]
    assert found["a dead row"] == 0.0


@pytest.mark.parametrize("name", only([name for name, case in CASES.items() if case.selected is not None], FEW))
def test_a_program_goes_through_several_rows_where_only_the_device_knows_their_number(facts: Any, name: str) -> None:
    assert facts["few programs"][name] == facts["cases"][name]


@pytest.mark.parametrize("name", EXTRAS)
def test_triton_agrees_where_logits_are_not_finite(facts: Any, name: str) -> None:
    found = facts["extras"][name]

    assert {each: far for each, far in found.items() if not far < ROUNDING["float32"]} == {}
    assert found["a dead row"] == 0.0


@pytest.mark.parametrize("tokens", TOKENS)
def test_triton_agrees_on_results_with_one_number_per_token(facts: Any, tokens: int) -> None:
    found = facts["tokens"][str(tokens)]

    assert len(found) == 12
    assert {each: far for each, far in found.items() if not far <= 1e-7 * tokens} == {}


def test_the_public_function_goes_through_triton_and_is_right(facts: Any) -> None:
    found = facts["whole"]

    assert len(found) == 16
    assert {name: far for name, far in found.items() if not max(far.values()) < ROUNDING["float32"]} == {}


# On devices that this host need not have


@pytest.fixture(scope="module")
def programs() -> Any:
    """Return the results of `vocabulary_softmax_targets.py`: for each architecture, the resources of each program."""
    return compiled_programs.needs("vocabulary_softmax_targets.py", *ARCHITECTURES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_program_compiles_for_every_device_and_needs_little_shared_memory(
    programs: Any, architecture: str
) -> None:
    needs = programs[architecture]

    assert {each["kernel"] for each in needs} == {"_statistics", "_gradient", "_others", "_losses", "_coefficients"}
    assert [each for each in needs if each["shared"] > SHARED] == []


def test_on_hopper_a_gradient_of_selected_rows_wide_ones_too_has_room_in_few_registers(programs: Any) -> None:
    few = [each for each in programs["90"] if each["registers"] and each["kernel"] == "_gradient"]

    assert few
    assert max(each["stack"] for each in few) <= ROOM


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_program_begins_before_the_preceding_product_ends(programs: Any, architecture: str) -> None:
    for each in programs[architecture]:
        assert (each["lets the next begin"], each["waits"], each["begins early"]) == (-1, -1, False)
