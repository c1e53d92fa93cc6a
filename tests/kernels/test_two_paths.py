"""Linear cross entropy where tokens may be left out: one way for all tokens, one for some, and only one that does anything.

On the CPU, in plain PyTorch, and with the passes in Triton's interpreter; the GPU is tested in tests/gpu.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import kept_answers
import nothing_cases
import pytest
import torch
from computed_products import products
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cross_entropy_cases import IGNORED, call, errors, found, leaves_of, truth
from nothing_cases import CLASSES, DEPTH, ROWS, room, written
from releases import only
from two_paths_cases import MEMORY_ON_A_GPU, SIZES, SIZES_ON_A_GPU, TOKENS, labelled, memory_of, poisoned

from megacpp_overlays.kernels.linear_cross_entropy import block_sizes, entry, path_buffer
from megacpp_overlays.kernels.linear_cross_entropy import memory as linear_cross_entropy_memory
from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory
from megacpp_overlays.kernels.linear_cross_entropy.shard import GradientRequest, Shard
from megacpp_overlays.kernels.linear_cross_entropy.shard_passes import shard_gradients, shard_statistics
from megacpp_overlays.kernels.masked_products.panels import CLASS_ALIGNMENT
from megacpp_overlays.kernels.masked_products.products import PanelProducts, Products, TileWave
from megacpp_overlays.kernels.masked_products.row_counts import NOTHING
from megacpp_overlays.kernels.masked_products.token_selection import select
from megacpp_overlays.kernels.vocabulary_softmax import in_torch
from megacpp_overlays.kernels.vocabulary_softmax.numbers import Coefficients

MIB = 2**20
WIDE = memory_of(torch.float64)
COUNTS = st.one_of(st.sampled_from([0, 1, TOKENS - 1, TOKENS, TOKENS]), st.integers(0, TOKENS))
HALVES = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest relative error."""


def close(seen: dict[str, torch.Tensor], true: dict[str, torch.Tensor]) -> None:
    assert seen.keys() == true.keys()
    for name, each in true.items():
        torch.testing.assert_close(seen[name].double(), each.double(), rtol=1e-9, atol=1e-9, equal_nan=True)


# Results


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 2**31),
    count=COUNTS,
    without_gradient=st.sampled_from([0, 0, 1, 150, TOKENS - 1, TOKENS]),
    reduction=st.sampled_from(["none", "none", "sum", "mean"]),
    bias=st.booleans(),
    class_weight=st.booleans(),
    terms=st.fixed_dictionaries(
        {
            "label_smoothing": st.sampled_from([0.0, 0.1]),
            "softcap": st.sampled_from([None, 3.0]),
            "lse_square_scale": st.sampled_from([0.0, 0.03]),
        }
    ),
)
def test_losses_and_gradients_are_those_of_float64_for_every_count(
    seed: int, count: int, without_gradient: int, reduction: str, bias: bool, class_weight: bool, terms: dict[str, Any]
) -> None:
    inputs = labelled(count, seed=seed, bias=bias, class_weight=class_weight, reduction=reduction, **terms)
    if reduction == "none":
        inputs.arriving = torch.where(torch.randperm(TOKENS) < without_gradient, 0.0, inputs.arriving)

    with poisoned() as ways:
        seen = found(inputs, memory=WIDE)

    assert len(ways) == 2  # one for each pass
    close(seen, truth(inputs))


@pytest.mark.parametrize("count", only([0, 1, 128, TOKENS - 1, TOKENS], [128, TOKENS]))
@pytest.mark.parametrize("less", only([0, 1, 130], [0, 130]))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_in_half_precision_too_and_where_a_weight_gradient_is_added(count: int, less: int, dtype: torch.dtype) -> None:
    inputs = labelled(count, dtype=dtype, bias=True, softcap=5.0, label_smoothing=0.1)
    inputs.arriving = torch.where(torch.arange(TOKENS) < less, 0.0, inputs.arriving)
    true, main_grad = truth(inputs), torch.full(inputs.weight.shape, 3.0)

    with poisoned() as ways:
        seen = found(inputs, memory=memory_of(dtype))
        leaves = leaves_of(inputs)
        loss = call(inputs, memory=memory_of(dtype), main_grad=main_grad)
        of_hidden, of_bias = torch.autograd.grad(loss, [leaves["hidden"], leaves["bias"]], inputs.arriving)

    assert len(ways) == 4
    assert max(errors(seen, true).values()) < HALVES[dtype]
    added = {"hidden": of_hidden, "weight": main_grad - 3.0, "bias": of_bias}
    assert max(errors(added, {name: true[name] for name in added}).values()) < HALVES[dtype]


@pytest.mark.parametrize("dtype", SIZES, ids=str)
def test_without_a_mask_the_result_is_that_of_computing_all_tokens(dtype: torch.dtype) -> None:
    inputs = labelled(TOKENS, dtype=dtype, bias=True)
    memory = memory_of(dtype)

    with poisoned() as ways:
        seen = found(inputs, memory=memory)
    computed = found(inputs, memory=replace(memory, masked="compute"))

    assert len(ways) == 2
    limits = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 1e-4}
    for name, each in computed.items():
        torch.testing.assert_close(seen[name], each, **limits)


@pytest.mark.parametrize("count", [200, TOKENS])
def test_fewer_tokens_in_every_later_pass(count: int) -> None:
    """The first of them finds the logits that stayed from the forward pass, if they belong to the path that it takes."""
    inputs = labelled(count, bias=True)
    leaves = leaves_of(inputs)

    with poisoned():
        loss = call(inputs, memory=WIDE)
        for share in (1.0, 0.9, 0.3, 0.0):
            inputs.arriving = torch.where(torch.rand(TOKENS) < share, inputs.arriving, 0.0)
            slopes = torch.autograd.grad(loss, list(leaves.values()), inputs.arriving, retain_graph=True)
            true = truth(inputs)
            close(dict(zip(leaves, slopes, strict=True)), {name: true[name] for name in leaves})


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_hidden_states_of_ignored_tokens_are_not_looked_at(odd: float) -> None:
    inputs = labelled(TOKENS - 1, bias=True, label_smoothing=0.1)
    expected = found(inputs, memory=WIDE)
    inputs.hidden = inputs.hidden.detach().clone()
    inputs.hidden[~inputs.alive] = odd

    seen = found(inputs, memory=WIDE)

    assert all(torch.equal(seen[name], expected[name]) for name in expected)


@pytest.mark.parametrize("count", [0, 100, TOKENS])
def test_who_waits_for_the_gradient_of_hidden_states_gets_the_whole_once(count: int) -> None:
    inputs = labelled(count)
    shard = Shard(weight=inputs.weight, logits_dtype=torch.float64)
    selection = select(inputs.alive)
    scale = torch.where(inputs.alive, inputs.arriving, 0.0).double()
    heard: list[torch.Tensor] = []

    with poisoned() as ways:
        running, kept = shard_statistics(inputs.hidden, inputs.target, shard, WIDE, selection=selection)
        gradients = shard_gradients(
            inputs.hidden, inputs.target, shard, Coefficients(running.lse, scale, scale), WIDE, GradientRequest(),
            kept=kept, selection=selection, when_hidden_is_done=lambda done: heard.append(done.clone()),
        )  # fmt: skip

    assert len(ways) == 2  # one for each pass
    true = truth(inputs)
    [of_hidden] = heard
    torch.testing.assert_close(of_hidden[:count].double(), true["hidden"][inputs.alive])
    assert gradients.of_weight is not None
    torch.testing.assert_close(gradients.of_weight, true["weight"])


@pytest.mark.parametrize(("count", "less"), [(TOKENS, 0), (TOKENS, 1), (100, 0)])
def test_the_entry_for_megatron_goes_both_ways_too(count: int, less: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits are float32, and their gradient takes half of each row."""
    inputs = labelled(count, dtype=torch.bfloat16)
    inputs.arriving = torch.where(torch.arange(TOKENS) < less, 0.0, inputs.arriving)
    monkeypatch.setattr(linear_cross_entropy_memory, "_chosen", memory_of(torch.bfloat16))
    given_ = inputs.weight, inputs.target

    with poisoned() as ways:
        loss, maximum, total, labels, *_, rows = entry.forward_on_any_device(
            inputs.hidden, *given_, None, "none", IGNORED, False
        )
        hidden, weight = entry.backward_on_any_device(
            inputs.arriving, rows, *given_, maximum, total, labels, "none", IGNORED, None, 0, 1, False
        )

    assert len(ways) == 2
    seen = errors({"loss": loss, "hidden": hidden, "weight": weight}, truth(inputs))
    assert max(seen.values()) < HALVES[torch.bfloat16]


# Skipped products, and memory


@pytest.mark.parametrize(
    ("count", "less", "logits"),
    [
        (TOKENS, 0, {TOKENS: 2 * 2100 - 768}),
        (TOKENS, 1, {TOKENS: 2100, TOKENS - 1: 2100}),
        (100, 0, {100: 2 * 2100 - 2 * 512}),
    ],
    ids=["all", "all with a label, and not all with a gradient", "some"],
)
def test_a_backward_pass_computes_logits_that_were_not_kept(count: int, less: int, logits: dict[int, int]) -> None:
    inputs = labelled(count)
    inputs.arriving = torch.where(torch.arange(TOKENS) < less, 0.0, inputs.arriving)

    shapes = products(lambda: found(inputs, memory=WIDE))

    for rows, classes in logits.items():
        assert (
            sum(columns for height, columns in shapes if height == rows and columns != inputs.hidden.shape[1])
            == classes
        )


MODELS = [(8192, 4096, 131072), (12288, 4096, 151552), (8192, 7168, 129280)]


@pytest.mark.parametrize("sizes", MODELS, ids=str)
@pytest.mark.parametrize("logits", [torch.bfloat16, torch.float32], ids=str)
def test_both_ways_stay_within_the_memory_and_one_has_blocks_as_wide_as_without_a_copy(
    sizes: tuple[int, int, int], logits: torch.dtype
) -> None:
    tokens, size, classes = sizes
    hidden, weight = (torch.empty(rows, size, dtype=torch.bfloat16) for rows in (tokens, classes))
    shard = Shard(weight=weight, logits_dtype=logits)
    selection = select(torch.ones(tokens, dtype=torch.bool))

    both = block_sizes.two_paths(hidden, shard, Memory(masked="skip"), selection)

    assert both is not None
    sums = hidden.numel() * 4 - hidden.nbytes
    assert path_buffer.allocate(both, hidden).nbytes + sums + 64 * tokens <= 256 * MIB
    computing = block_sizes.step_of(hidden, shard, Memory(masked="compute"))
    assert both.compact.panels.width < both.dense.panels.width <= computing
    assert computing - both.dense.panels.width <= CLASS_ALIGNMENT
    assert both.compact.panels.width == block_sizes.step_of(hidden, shard, Memory(masked="skip"))


@pytest.mark.parametrize(
    ("sizes", "memory"),
    [*((sizes, Memory(masked="skip")) for sizes in MODELS), (SIZES_ON_A_GPU, MEMORY_ON_A_GPU)],
    ids=str,
)
def test_blocks_of_full_waves_are_wider_without_a_copy_too(sizes: tuple[int, int, int], memory: Memory) -> None:
    tokens, size, classes = sizes
    hidden, weight = (torch.empty(rows, size, dtype=torch.bfloat16) for rows in (tokens, classes))
    shard = Shard(weight=weight, logits_dtype=torch.bfloat16)

    with mock.patch.object(block_sizes, "wave_of", return_value=TileWave(rows=128, columns=256, tiles=132)):
        both = block_sizes.two_paths(hidden, shard, memory, select(torch.ones(tokens, dtype=torch.bool)))

    assert both is not None
    assert both.compact.panels.width < both.dense.panels.width


@pytest.mark.parametrize(
    ("memory", "shard"),
    [
        ({"masked": "auto"}, {}),
        ({"masked": "compute"}, {}),
        ({"block_classes": 512}, {}),
        ({"panels": 1}, {}),
        ({"extra_mib": 64}, {}),
        ({}, {"is_whole": False}),
        ({}, {"weight": torch.zeros(2100, 240)}),
    ],
    ids=str,
)
def test_everything_else_goes_one_way(memory: dict[str, Any], shard: dict[str, Any]) -> None:
    inputs = labelled(TOKENS)
    layer = Shard(weight=inputs.weight, logits_dtype=torch.float64)
    given_ = inputs.hidden, replace(layer, **shard), replace(WIDE, **memory)

    assert block_sizes.two_paths(*given_, select(inputs.alive)) is None
    assert block_sizes.two_paths(*given_, None) is None
    assert block_sizes.two_paths(inputs.hidden, layer, WIDE, select(inputs.alive)) is not None


# Nothing to do


def test_products_of_nothing_leave_results_as_they_are() -> None:
    left, right, matrix = torch.ones(ROWS, CLASS_ALIGNMENT), torch.ones(CLASS_ALIGNMENT, DEPTH), torch.ones(ROWS, DEPTH)
    alone, order = Products(nothing_cases.count()), torch.arange(ROWS)
    results = room(ROWS, DEPTH), room(CLASS_ALIGNMENT, DEPTH), room(CLASS_ALIGNMENT)
    for add in (False, True):
        for by in (None, order):
            alone.of_rows(left, right, out=results[0], add=add, order=by)
            alone.over_rows(left, matrix, out=results[1], add=add, order=by)
    alone.sum_rows(left, out=results[2])

    assert not written(*results)


@pytest.mark.parametrize("laid", [NOTHING, 100])
def test_panels_of_nothing_leave_results_as_they_are(laid: int) -> None:
    cut = nothing_cases.panels(planned_rows=laid)
    hidden, weight = torch.ones(ROWS, DEPTH), torch.ones(CLASSES, DEPTH)
    block, of_hidden, of_weight, total = (
        room(ROWS, CLASS_ALIGNMENT),
        room(ROWS, DEPTH),
        room(CLASSES, DEPTH),
        room(CLASSES),
    )
    products_ = PanelProducts(nothing_cases.count(), cut)
    calls = (
        products_.of_rows(hidden, weight.t(), out=block),
        products_.across(block, weight, out=of_hidden),
        products_.over_rows(block, hidden, out=of_weight),
        products_.sum_rows(block, out=total),
    )
    for group in range(cut.number):
        for each in calls:
            each(group)

    assert not written(block, of_hidden, of_weight, total)


def test_rows_of_nothing_stay_where_they_are() -> None:
    rows, selection = torch.arange(ROWS * 2.0).view(ROWS, 2), nothing_cases.selection()
    before, out = rows.clone(), room(ROWS, 2)

    assert selection.first(rows, out=out) is out
    selection.bring_first(rows)
    selection.bring_first(rows, nothing_cases.panels())

    assert not written(out)
    assert torch.equal(rows, before)


def test_passes_over_nothing_leave_numbers_and_gradients_as_they_are() -> None:
    written_ = nothing_cases.by_passes(in_torch)

    assert len(written_) == 8
    assert not any(written_.values()), written_


# In Triton


def test_triton_goes_both_ways_and_writes_nothing_on_the_empty_one() -> None:
    pytest.importorskip("triton")
    facts = kept_answers.answer("two_paths_facts.py", TRITON_INTERPRET="1")

    assert len(facts["whole"]) == 4
    assert {name: each for name, each in facts["whole"].items() if not max(each.values()) < 1e-2} == {}
    assert len(facts["nothing"]) == 8
    assert not any(facts["nothing"].values()), facts["nothing"]
