"""Linear cross entropy over the tokens that have a label, on a GPU of compute capability 9: right, bounded, never waiting.

With `-s` the memory that was taken is printed.
"""

# ruff: noqa: T201 - prints measurements

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from linear_cross_entropy_cases import IGNORED, Inputs, call, capture, draw, errors, found, leaves_of, truth
from two_paths_cases import MEMORY_ON_A_GPU, SIZES_ON_A_GPU, poisoned

from megacpp_overlays.kernels.linear_cross_entropy import entry
from megacpp_overlays.kernels.linear_cross_entropy import memory as linear_cross_entropy_memory
from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory
from megacpp_overlays.kernels.masked_products.panels import Panels
from megacpp_overlays.kernels.masked_products.products import PanelProducts, Products
from megacpp_overlays.kernels.masked_products.row_counts import NOTHING, ROW_ALIGNMENT
from megacpp_overlays.kernels.masked_products.token_selection import Selection, select
from megacpp_overlays.kernels.vocabulary_softmax.numbers import Coefficients, Statistics
from megacpp_overlays.kernels.vocabulary_softmax.passes import (
    add_panel_statistics,
    add_statistics,
    logits_gradient,
    panel_gradients,
)

# Triton warns as it likes.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

DEVICE = "cuda"
MIB = 2**20
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest relative error of a gradient."""
WAYS = {
    "one block": Memory(masked="skip"),
    "blocks": Memory(block_classes=4096, masked="skip"),
    "keep": Memory(block_classes=4096, logits="keep", masked="skip"),
    "two paths": MEMORY_ON_A_GPU,
}
COUNTS = [0, 1, 127, 500, 1000]
SIZES = SIZES_ON_A_GPU
EVERY = {"bias": True, "class_weight": True, "label_smoothing": 0.1, "softcap": 5.0, "lse_square_scale": 1e-3}
MODELS = [
    (8192, 4096, 131072),
    (12288, 4096, 151552),
    (8192, 7168, 129280),
    (8192, 7680, 128256),
    (15360, 4096, 131072),
    (8192, 8192, 128256),
    (4096, 2048, 32000),
]


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    """Leave no memory to the next test, and no setting; nothing here is for other devices."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not of compute capability 9")
    yield
    torch.cuda.set_sync_debug_mode("default")
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(params=WAYS)
def memory(request: pytest.FixtureRequest) -> Memory:
    return WAYS[request.param]


def labelled(inputs: Inputs, count: int, seed: int = 3) -> Inputs:
    """Return a call with contiguous tensors that ignores all but so many tokens, anywhere."""
    target = torch.where(inputs.alive, inputs.target, 0)
    order = torch.randperm(target.numel(), generator=torch.Generator().manual_seed(seed)).to(target.device)
    target[order[count:]] = IGNORED
    return replace(inputs, hidden=inputs.hidden.contiguous(), weight=inputs.weight.contiguous(), target=target)


def drawn(count: int, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **options: Any) -> Inputs:
    return labelled(draw(*SIZES, dtype=dtype, device=DEVICE, seed=seed, **options), count, seed)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# The parts


@pytest.mark.parametrize("tokens", [1, 1000, 1024, 5000, 70_000])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_tokens_are_selected_as_a_stable_sort_does(tokens: int, share: float) -> None:
    wanted = torch.rand(tokens, device=DEVICE) < share
    rows = torch.randn(tokens, 136, device=DEVICE)

    selection = select(wanted)
    first = selection.first(torch.where(wanted.unsqueeze(1), rows, torch.nan))
    count = int(selection.count)

    assert torch.equal(selection.order, torch.argsort(wanted.logical_not().to(torch.uint8), stable=True))
    assert torch.equal(selection.order[selection.place], torch.arange(tokens, device=DEVICE))
    assert count == int(wanted.sum())
    assert torch.equal(first[:count], rows[wanted])
    assert not first[count : max(1, -(-count // ROW_ALIGNMENT)) * ROW_ALIGNMENT].any()
    assert torch.equal(selection.put_back(first, torch.bfloat16), torch.where(wanted.unsqueeze(1), rows, 0).bfloat16())


@pytest.mark.parametrize("count", [0, 1, 63, 64, 1000, 5000])
def test_rows_that_count_are_added_up(count: int) -> None:
    matrix = torch.randn(5000, 4104, device=DEVICE).bfloat16()[:, :4099]
    matrix[count:] = torch.nan
    out = torch.empty(4099, device=DEVICE)

    Products(torch.tensor([count], dtype=torch.int32, device=DEVICE)).sum_rows(matrix, out=out)

    torch.testing.assert_close(out, matrix[:count].double().sum(dim=0).float(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 129, 1000, 2048])
@pytest.mark.parametrize("depth", [512, 528, 520])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_products_take_rows_from_anywhere(dtype: torch.dtype, depth: int, count: int) -> None:
    rows, columns = 2048, 4104
    order = torch.randperm(rows, device=DEVICE)
    hidden, weight = (torch.randn(each, depth, device=DEVICE).to(dtype) for each in (rows, columns))
    gradient = torch.randn(rows, columns, device=DEVICE).to(dtype)
    gradient[count:] = 0
    hidden[order[count:]] = torch.nan
    products = Products(torch.tensor([count], dtype=torch.int32, device=DEVICE))
    some = hidden[order[:count]].double()

    for out in (dtype, torch.float32):
        logits, of_weight = (torch.ones(each, device=DEVICE, dtype=out) for each in ((rows, columns), (columns, depth)))
        products.of_rows(hidden, weight.t(), out=logits, order=order)
        products.over_rows(gradient, hidden, out=of_weight, add=out == torch.float32, order=order)

        for seen, true in (
            (logits[:count].double(), some @ weight.double().t()),
            (of_weight.double() - float(out == torch.float32), gradient[:count].double().t() @ some),
        ):
            assert float((seen - true).norm() / (true.norm() or 1.0)) < LIMITS[dtype]


# Results


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("options", [{}, EVERY, {"reduction": "mean"}], ids=["plain", "every option", "mean"])
def test_losses_and_gradients_are_those_of_float64(
    count: int, dtype: torch.dtype, options: dict[str, Any], memory: Memory
) -> None:
    if not count and "reduction" in options:
        pytest.skip("a mean over nothing")
    inputs = drawn(count, dtype=dtype, **options)
    if dtype == torch.float16 and inputs.reduction == "mean":
        inputs.arriving = inputs.arriving * 2**10  # as a loss scale does: float16 holds nothing below 6e-8

    seen = errors(found(inputs, memory=memory), truth(inputs))

    print(count, dtype, {name: f"{value:.1e}" for name, value in seen.items()})
    assert max(seen.values()) < LIMITS[dtype]


@pytest.mark.parametrize("count", COUNTS[1:])
def test_results_have_the_bits_of_the_same_tokens_alone(count: int, memory: Memory) -> None:
    if memory is WAYS["two paths"]:
        pytest.skip("how many tokens there are says how wide a block is")
    inputs = drawn(count, bias=True, softcap=5.0)
    kept = inputs.alive
    alone = replace(inputs, hidden=inputs.hidden[kept], target=inputs.target[kept], arriving=inputs.arriving[kept])
    memory = replace(memory, panels=1)  # how many share a block is a question of how many tokens there are, too

    seen, expected = found(inputs, memory=memory), found(alone, memory=memory)

    assert torch.equal(seen["loss"][kept], expected["loss"])
    assert torch.equal(seen["hidden"][kept], expected["hidden"])
    assert torch.equal(seen["weight"], expected["weight"])
    assert torch.equal(seen["bias"], expected["bias"])
    assert not seen["loss"][~kept].any()
    assert not seen["hidden"][~kept].any()


def test_tokens_without_a_gradient_are_skipped_among_those_with_a_label(memory: Memory) -> None:
    inputs = drawn(600)
    inputs.arriving = torch.where(torch.rand(SIZES[0], device=DEVICE) < 0.5, inputs.arriving, 0.0)

    seen = errors(found(inputs, memory=memory), truth(inputs))

    assert max(seen.values()) < LIMITS[torch.bfloat16]


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 3e38])
def test_hidden_states_of_ignored_tokens_are_not_looked_at(odd: float, memory: Memory) -> None:
    inputs = drawn(500, bias=True)
    expected = found(inputs, memory=memory)
    inputs.hidden = inputs.hidden.detach().clone()
    inputs.hidden[~inputs.alive] = odd

    assert same(found(inputs, memory=memory), expected)


@pytest.mark.parametrize("less", [0, 1, 600])
@pytest.mark.parametrize("count", [999, 1000])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_what_was_whole_may_lack_tokens_in_a_later_pass(dtype: torch.dtype, count: int, less: int) -> None:
    """Memory that was never written holds nothing but NaN."""
    inputs = drawn(count, dtype=dtype, **EVERY)
    inputs.arriving = torch.where(torch.arange(SIZES[0], device=DEVICE) < less, 0.0, inputs.arriving)
    memory, true = WAYS["two paths"], truth(inputs)
    main_grad = torch.ones(inputs.weight.shape, device=DEVICE)

    with poisoned() as ways:
        seen = found(inputs, memory=memory)
        leaves = leaves_of(inputs)
        loss = call(inputs, memory=memory, main_grad=main_grad)
        of_hidden, of_bias = torch.autograd.grad(loss, [leaves["hidden"], leaves["bias"]], inputs.arriving)

    assert len(ways) == 4
    assert max(errors(seen, true).values()) < LIMITS[dtype]
    added = {"hidden": of_hidden, "weight": main_grad - 1, "bias": of_bias}
    assert max(errors(added, {name: true[name] for name in added}).values()) < LIMITS[dtype]


@pytest.mark.parametrize("by_order", [False, True])
@pytest.mark.parametrize("laid", [NOTHING, 100])
def test_where_there_is_nothing_to_do_nothing_is_written(laid: int, by_order: bool) -> None:
    rows, depth, classes, old = 1000, 520, 3 * 256 + 72, 7.0
    number = torch.tensor([NOTHING], dtype=torch.int32, device=DEVICE)
    order = torch.arange(rows, device=DEVICE).flip(0)
    panels = Panels.cut(classes, 256, rows, torch.full_like(number, laid))
    assert panels is not None

    def room(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, old, dtype=dtype, device=DEVICE)

    hidden, weight = (room(each, depth, dtype=torch.bfloat16) for each in (rows, classes))
    block, of_hidden, of_weight, total = (
        room(rows, 256).bfloat16(),
        room(rows, depth),
        room(classes, depth),
        room(classes),
    )
    copy, numbers = room(rows, depth, dtype=torch.bfloat16), Statistics(*room(4, rows).unbind())
    selection, labels = Selection(order, order, number), torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    by = order if by_order else None
    products = PanelProducts(number, panels)
    calls = [
        products.of_rows(hidden, weight.t(), out=block, order=by),
        *(products.across(block, weight, out=of_hidden, add=add) for add in (False, True)),
        *(products.over_rows(block, hidden, out=of_weight, add=add, order=by) for add in (False, True)),
        products.sum_rows(block, out=total),
        add_panel_statistics(block, labels, 0, numbers, selection=selection, panels=panels),
        panel_gradients(block, labels, 0, Coefficients(*numbers), block, selection=selection, panels=panels),
    ]
    for group in range(panels.number):
        for each in calls:
            each(group)
    add_statistics(block, labels, 0, numbers, first=True, selection=selection)
    logits_gradient(block, labels, 0, Coefficients(*numbers), block, selection=selection)
    selection.first(hidden, out=copy)
    selection.bring_first(block, panels)

    assert all(bool((each == old).all()) for each in (block, of_hidden, of_weight, total, copy, *numbers))


@pytest.mark.parametrize("count", [0, 1, 3000, 8192])
def test_hidden_states_without_room_for_a_copy_are_taken_from_where_they_are(count: int) -> None:
    inputs = labelled(draw(8192, 1024, 9000, dtype=torch.bfloat16, device=DEVICE, bias=True), count)
    memory = Memory(extra_mib=24, masked="skip")  # 16 MiB are the gradient less its result, 16 would be the copy

    seen, copied = (found(inputs, memory=each) for each in (memory, Memory(block_classes=512, masked="skip")))

    true = truth(inputs)
    assert max(errors(seen, true).values()) < LIMITS[torch.bfloat16]
    assert max(errors(copied, true).values()) < LIMITS[torch.bfloat16]


def test_more_tokens_than_a_grid_has_rows(memory: Memory) -> None:
    inputs = labelled(draw(70_000, 64, 504, dtype=torch.bfloat16, device=DEVICE), 30_000)

    seen = errors(found(inputs, memory=replace(memory, block_classes=256)), truth(inputs))

    assert max(seen.values()) < LIMITS[torch.bfloat16]


def test_the_entry_for_megatron_skips_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = drawn(500)
    monkeypatch.setattr(linear_cross_entropy_memory, "_chosen", Memory(extra_mib=32, masked="skip"))

    loss, maximum, total, count, *_, rows = entry.forward(inputs.hidden, inputs.weight, inputs.target, None, "none")
    hidden, weight = entry.backward(inputs.arriving, rows, inputs.weight, inputs.target, maximum, total, count, "none")

    assert int(count) == 500
    assert bool(maximum.isfinite().all() & total.isfinite().all())
    seen = errors({"loss": loss, "hidden": hidden, "weight": weight}, truth(inputs))
    assert max(seen.values()) < LIMITS[torch.bfloat16]


# How it runs


def test_a_step_never_waits_for_the_host(memory: Memory) -> None:
    inputs = drawn(500, **EVERY)
    expected = found(inputs, memory=memory)  # programs are compiled
    torch.cuda.synchronize()

    torch.cuda.set_sync_debug_mode("error")
    seen = found(inputs, memory=memory)
    with torch.no_grad():
        evaluated = call(inputs, memory=memory)
    torch.cuda.set_sync_debug_mode("default")

    assert same(seen, expected)
    torch.testing.assert_close(evaluated, expected["loss"])


@pytest.mark.parametrize("options", [{}, {**EVERY, "reduction": "sum"}], ids=["plain", "every option, sum"])
def test_a_captured_step_replays_with_other_counts_as_it_runs_outside(options: dict[str, Any], memory: Memory) -> None:
    inputs = drawn(500, **options)
    leaves_of(inputs)
    static = {name: each for name, each in vars(inputs).items() if isinstance(each, torch.Tensor)}
    captured = capture(lambda: found(inputs, memory=memory))

    for seed, count in enumerate(COUNTS, start=1):
        fresh = drawn(count, seed=seed, **options)
        with torch.no_grad():
            for name, each in static.items():
                each.copy_(getattr(fresh, name))
        replayed = captured()
        assert same(replayed, found(fresh, memory=memory)), count


def test_a_step_that_is_repeated_gives_the_same_bits(memory: Memory) -> None:
    inputs = drawn(500, **EVERY)

    assert same(found(inputs, memory=memory), found(inputs, memory=memory))


@pytest.mark.parametrize("masked", ["skip", "compute"])
@pytest.mark.parametrize("classes", [20001, 20000, 4097, 131073])
@pytest.mark.parametrize("count", [1, 500, 857, 1000])
def test_every_class_counts_once(count: int, classes: int, masked: str) -> None:
    """Logits that are all 0 have no rounding: a class more or less than there are would show as 7e-6 and more."""
    inputs = labelled(draw(1000, 520, classes, dtype=torch.bfloat16, device=DEVICE), count)
    inputs = replace(inputs, hidden=torch.zeros_like(inputs.hidden))

    losses = found(inputs, memory=Memory(extra_mib=16, masked=masked))["loss"]

    expected = torch.where(inputs.alive, math.log(classes), 0.0)
    assert float((losses - expected).abs().max()) < 3e-6


@pytest.mark.parametrize(("count", "skips"), [(500, True), (1000, False)])
def test_by_itself_a_process_looks_once_and_forward_passes_skip_from_then_on(count: int, skips: bool) -> None:
    inputs = drawn(count)
    memory = Memory(extra_mib=16)
    first = found(inputs, memory=memory)
    found(inputs, memory=memory)  # programs of the other way are compiled

    torch.cuda.set_sync_debug_mode("error")
    seen = found(inputs, memory=memory)
    torch.cuda.set_sync_debug_mode("default")

    assert memory.settled.skips_labels is memory.settled.skips is skips
    assert same(seen, found(inputs, memory=Memory(extra_mib=16, masked="skip" if skips else "compute")))
    assert max(errors(first, truth(inputs)).values()) < LIMITS[torch.bfloat16]


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("sizes", MODELS, ids=str)
def test_a_step_takes_no_more_memory_than_it_may(sizes: tuple[int, int, int], share: float) -> None:
    tokens, hidden, classes = sizes
    leaves = [
        torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for rows in (tokens, classes)
    ]
    target = torch.randint(0, classes, (tokens,), device=DEVICE)
    target[int(share * tokens) :] = IGNORED
    arriving = torch.rand(tokens, device=DEVICE)
    inputs = Inputs(*leaves, target, arriving)
    taken: dict[str, float] = {}

    for _ in range(2):  # the first brings workspaces
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = call(inputs, memory=Memory(masked="skip"))
        taken["forward"] = (torch.cuda.max_memory_allocated() - before - loss.nbytes) / MIB
        slopes = torch.autograd.grad(loss, leaves, arriving)
        torch.cuda.synchronize()
        results = sum(each.nbytes for each in (loss, *slopes))
        taken["step"] = (torch.cuda.max_memory_allocated() - before - results) / MIB
        del loss, slopes

    print(sizes, share, taken)
    # The gradient of the hidden states in float32, the narrowest block of logits, and a few numbers of each token: there is no less.
    assert taken["step"] <= max(256, tokens * (hidden + 256 + 32) * 4 / MIB)
    # A forward pass has no gradients yet whose memory a copy of the hidden states could count on.
    assert taken["forward"] <= 256 + 4 + tokens * hidden * 2 / MIB
