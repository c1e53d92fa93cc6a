"""Products that leave masked tokens out, on a GPU of compute capability 9: right, bounded, and never waiting."""

# ruff: noqa: T201 - prints measurements

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from linear_cross_entropy_cases import Inputs, call, capture, draw, errors, found, leaves_of, truth

from megacpp_overlays.kernels.linear_cross_entropy.memory import MaskDecision, Memory
from megacpp_overlays.kernels.linear_cross_entropy.parallel import Group, Layer, Terms, backward_pass, forward_pass
from megacpp_overlays.kernels.linear_cross_entropy.shard import GradientRequest
from megacpp_overlays.kernels.masked_products import products as bounded_products
from megacpp_overlays.kernels.masked_products.products import Products
from megacpp_overlays.kernels.masked_products.token_selection import select

# Triton warns as it likes.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

DEVICE = "cuda"
MIB = 2**20
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest relative error of a gradient."""
AS_FAR = 1.1
"""At most, from float64, as another way that rounds as often."""
WAYS = {
    "one block": Memory(masked="skip"),
    "blocks": Memory(block_classes=4096, masked="skip"),
    "keep": Memory(block_classes=4096, logits="keep", masked="skip"),
}
ALIVE = {"none": 0.0, "one": -1.0, "few": 0.03, "half": 0.5, "all": 1.0}
"""The share of tokens that have a gradient; below 0, a number of them."""
MODELS = [(8192, 4096, 131072), (12288, 4096, 151552)]
EVERY = {"bias": True, "class_weight": True, "label_smoothing": 0.1, "softcap": 5.0, "lse_square_scale": 1e-3}


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


def masked(inputs: Inputs, share: float, seed: int = 3) -> Inputs:
    """Return a call whose tensors are contiguous and where some tokens alone have a gradient."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    tokens = inputs.target.numel()
    score = torch.rand(tokens, generator=generator, device=DEVICE)
    limit = score.sort().values[int(-share) - 1] if share < 0 else torch.tensor(share, device=DEVICE)
    arriving = torch.where(score <= limit, inputs.arriving, 0.0) if share else torch.zeros_like(inputs.arriving)
    hidden, weight = inputs.hidden.contiguous(), inputs.weight.contiguous()
    return replace(inputs, hidden=hidden, weight=weight, arriving=arriving)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# The products


@pytest.mark.parametrize("count", [0, 1, 63, 64, 128, 129, 1000, 2047, 2048])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_a_product_of_the_first_rows_is_that_of_cublas(count: int, dtype: torch.dtype) -> None:
    rows, depth, columns = 2048, 520, 4104
    hidden, weight = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((rows, depth), (columns, depth)))
    gradient = torch.randn(rows, columns + 56, device=DEVICE).to(dtype)[:, :columns]
    gradient[count:] = 0
    products = Products(torch.tensor([count], dtype=torch.int32, device=DEVICE))
    some, few = hidden[:count].double(), gradient[:count].double()

    for out, add in product((dtype, torch.float32), (False, True)):
        room = {
            name: torch.ones(*shape, dtype=out, device=DEVICE)
            for name, shape in {
                "logits": (rows, columns), "hidden": (rows, depth), "weight": (columns, depth)
            }.items()
        }  # fmt: skip
        products.of_rows(hidden, weight.t(), out=room["logits"], add=add)
        products.of_rows(gradient, weight, out=room["hidden"], add=add)
        products.over_rows(gradient, hidden, out=room["weight"], add=add)

        true = {"logits": some @ weight.double().t(), "hidden": few @ weight.double(), "weight": few.t() @ some}
        for name, each in true.items():
            seen = room[name].double() if name == "weight" else room[name][:count].double()
            far = float((seen - each - int(add)).norm() / ((each + int(add)).norm() or 1.0))
            assert far < LIMITS[dtype], (name, out, add, far)


@pytest.mark.parametrize("count", [1, 129, 700, 1000, 2047])
def test_what_a_row_gets_does_not_depend_on_how_many_count(count: int) -> None:
    """Nor on whether its tile is computed whole or in halves, as those of a last wave are that has few of them."""
    hidden, weight = (torch.randn(rows, 520, device=DEVICE).bfloat16() for rows in (2048, 4104))
    sums = {}

    for rows in (count, 2048):
        products = Products(torch.tensor([rows], dtype=torch.int32, device=DEVICE))
        room = torch.ones(2048, 4104, device=DEVICE)
        products.of_rows(hidden, weight.t(), out=room, add=True)
        sums[rows] = room[:count]

    assert torch.equal(sums[count], sums[2048])


def test_what_no_descriptor_can_address_is_computed_without_one() -> None:
    assert bounded_products.available(torch.bfloat16, torch.zeros(4, 64, dtype=torch.bfloat16, device=DEVICE))
    assert not bounded_products.available(torch.bfloat16, torch.zeros(4, 63, dtype=torch.bfloat16, device=DEVICE))
    assert not bounded_products.available(torch.float32, torch.zeros(4, 64, device=DEVICE))
    inputs = masked(draw(300, 63, 5000, dtype=torch.bfloat16, device=DEVICE), 0.5)

    seen = found(inputs, memory=Memory(masked="skip"))

    assert same(seen, found(inputs, memory=Memory(masked="compute")))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [64, 4104])
def test_rows_come_first_and_go_back_in_their_own_memory(columns: int, dtype: torch.dtype, share: float) -> None:
    whole = torch.randn(5000, columns + 8, device=DEVICE).to(dtype)
    padding, rows = whole[:, columns:].clone(), whole[:, :columns]
    wanted = torch.rand(5000, device=DEVICE) < share
    expected = rows[wanted]

    selection = select(wanted)
    selection.bring_first(rows)
    came = rows[: int(selection.count)].clone()
    rows[int(selection.count) :] = 0
    back = selection.put_back(rows, dtype, in_place=True)

    assert torch.equal(came, expected)
    assert back.data_ptr() == whole.data_ptr()
    assert torch.equal(back[wanted], expected)
    assert not back[~wanted].any()
    assert torch.equal(whole[:, columns:], padding)


# The loss


@pytest.mark.parametrize("alive", ALIVE)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("options", [{}, EVERY], ids=["plain", "every option"])
def test_gradients_are_those_of_float64(
    alive: str, dtype: torch.dtype, options: dict[str, Any], memory: Memory
) -> None:
    inputs = masked(draw(1000, 520, 20001, dtype=dtype, device=DEVICE, **options), ALIVE[alive])

    seen = errors(found(inputs, memory=memory), truth(inputs))

    print(alive, dtype, {name: f"{value:.1e}" for name, value in seen.items()})
    assert max(seen.values()) < LIMITS[dtype]


@pytest.mark.parametrize("alive", ["few", "half", "all"])
def test_gradients_are_as_good_as_those_of_all_products(alive: str, memory: Memory) -> None:
    inputs = masked(draw(2048, 1024, 32001, dtype=torch.bfloat16, device=DEVICE), ALIVE[alive])
    true = truth(inputs)

    seen, everything = (
        errors(found(inputs, memory=each), true) for each in (memory, replace(memory, masked="compute"))
    )

    assert {name: far for name, far in seen.items() if not far <= 1.02 * everything[name]} == {}


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_batch_may_be_tiny(tokens: int, memory: Memory) -> None:
    inputs = masked(draw(tokens, 520, 20001, dtype=torch.bfloat16, device=DEVICE, bias=True), 1.0)

    seen = errors(found(inputs, memory=memory), truth(inputs))

    assert max(seen.values()) < LIMITS[torch.bfloat16]


def test_two_micro_batches_are_added_up_in_main_grad(memory: Memory) -> None:
    inputs = masked(draw(1000, 520, 20001, dtype=torch.bfloat16, device=DEVICE), 0.5)
    leaves_of(inputs)
    main_grad = torch.zeros(20001, 520, device=DEVICE)

    for _ in range(2):
        call(inputs, memory=memory, main_grad=main_grad).backward(inputs.arriving)

    assert errors({"weight": main_grad / 2}, {"weight": truth(inputs)["weight"]})["weight"] < 1e-2


@pytest.mark.parametrize("classes", [0, 4096])
def test_logits_may_be_wider_than_the_hidden_states(classes: int) -> None:
    inputs = masked(draw(1000, 520, 20001, dtype=torch.bfloat16, device=DEVICE), 0.5)
    layer = Layer(weight=inputs.weight, logits_dtype=torch.float32)
    memory = Memory(block_classes=classes, masked="skip")
    forward = forward_pass(inputs.hidden, inputs.target, layer, Terms(), Group(), memory)

    hidden, weight, _ = backward_pass(
        inputs.arriving, inputs.hidden, inputs.target, forward.statistics, layer, Terms(), Group(), memory,
        GradientRequest(hidden_dtype=torch.bfloat16), kept=forward.kept,
    )  # fmt: skip

    assert hidden is not None
    assert weight is not None
    seen = errors({"loss": forward.losses, "hidden": hidden, "weight": weight}, truth(inputs))
    assert max(seen.values()) < 1e-2


# How it runs


@pytest.mark.parametrize(("share", "skips"), [(0.5, True), (1.0, False)])
def test_by_itself_a_process_looks_once_at_its_masks_and_never_waits_again(share: float, skips: bool) -> None:
    inputs = masked(draw(1000, 520, 20001, dtype=torch.bfloat16, device=DEVICE), share)
    memory = Memory(extra_mib=16)
    first = found(inputs, memory=memory)
    found(inputs, memory=memory)  # a first call cuts blocks so that it may skip; programs of others are compiled

    torch.cuda.set_sync_debug_mode("error")
    seen = found(inputs, memory=memory)
    torch.cuda.set_sync_debug_mode("default")

    assert memory.settled.skips is skips
    # Most have a label: with `auto` a forward pass computes all, by cuBLAS and in another order of classes than with `skip`.
    at_once = {"settled": MaskDecision(skips=True)} if skips else {"masked": "compute"}
    assert same(seen, found(inputs, memory=Memory(extra_mib=16, **at_once)))
    true = truth(inputs)
    explicit = found(inputs, memory=Memory(extra_mib=16, masked="skip" if skips else "compute"))
    far, limits = errors(seen, true), errors(explicit, true)
    assert {name: each for name, each in far.items() if each > AS_FAR * limits[name]} == {}
    assert max(errors(first, true).values()) < LIMITS[torch.bfloat16]


def test_what_is_captured_first_is_computed_for_all_tokens_and_settles_nothing() -> None:
    inputs = masked(draw(1000, 520, 20001, dtype=torch.bfloat16, device=DEVICE), 0.5)
    leaves_of(inputs)
    memory = Memory()

    captured = capture(
        lambda: found(inputs, memory=memory), warm_up=lambda: found(inputs, memory=Memory(masked="compute"))
    )

    assert memory.settled.skips is None
    assert same(captured(), found(inputs, memory=Memory(masked="compute")))


def test_a_step_that_is_repeated_gives_the_same_bits(memory: Memory) -> None:
    inputs = masked(draw(1000, 520, 20001, dtype=torch.bfloat16, device=DEVICE), 0.5)

    assert same(found(inputs, memory=memory), found(inputs, memory=memory))


def test_a_step_never_waits_for_the_host(memory: Memory) -> None:
    inputs = masked(draw(1000, 520, 20001, dtype=torch.bfloat16, device=DEVICE), 0.5)
    expected = found(inputs, memory=memory)  # programs are compiled
    torch.cuda.synchronize()

    torch.cuda.set_sync_debug_mode("error")
    seen = found(inputs, memory=memory)
    torch.cuda.set_sync_debug_mode("default")

    assert same(seen, expected)


def test_a_captured_step_replays_on_other_masks_as_it_runs_outside(memory: Memory) -> None:
    inputs = masked(draw(1000, 520, 20001, dtype=torch.bfloat16, device=DEVICE), 0.5)
    leaves_of(inputs)
    captured = capture(lambda: found(inputs, memory=memory))

    for seed, share in enumerate((0.1, 0.9, 0.0, 1.0)):
        fresh = masked(draw(1000, 520, 20001, dtype=torch.bfloat16, device=DEVICE, seed=seed), share, seed)
        inputs.arriving.copy_(fresh.arriving)
        with torch.no_grad():
            inputs.hidden.copy_(fresh.hidden)
        inputs.target.copy_(fresh.target)
        replayed = captured()
        expected = found(replace(inputs), memory=memory)
        assert same(replayed, expected)


def test_a_device_that_is_not_the_current_one_can_be_used(memory: Memory) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    inputs = masked(draw(1000, 520, 20001, dtype=torch.bfloat16, device=DEVICE), 0.5)
    other = replace(
        inputs,
        **{name: getattr(inputs, name).to("cuda:1") for name in ("hidden", "weight", "target", "arriving")},
    )

    seen = found(other, memory=memory)

    assert {each.device.index for each in seen.values()} == {1}
    assert same({name: each.to(DEVICE) for name, each in seen.items()}, found(inputs, memory=memory))


@pytest.mark.parametrize("logits", ["recompute", "keep"])
@pytest.mark.parametrize("sizes", MODELS, ids=str)
def test_a_step_takes_no_more_memory_than_it_may(sizes: tuple[int, int, int], logits: str) -> None:
    tokens, hidden, classes = sizes
    leaves = [
        torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for rows in (tokens, classes)
    ]
    target = torch.randint(0, classes, (tokens,), device=DEVICE)
    arriving = (torch.rand(tokens, device=DEVICE) < 0.5).float()
    inputs = Inputs(*leaves, target, arriving)
    peaks = {}

    for way in ("compute", "skip", "compute", "skip"):  # the first of each brings workspaces
        memory = Memory(logits=logits, masked=way)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = call(inputs, memory=memory)
        slopes = torch.autograd.grad(loss, leaves, arriving)
        torch.cuda.synchronize()
        results = sum(each.nbytes for each in (loss, *slopes))
        peaks[way] = (torch.cuda.max_memory_allocated() - before - results) / MIB
        del loss, slopes

    print(sizes, logits, peaks)
    if logits == "recompute":
        assert peaks["skip"] <= 256
    else:
        assert peaks["skip"] <= peaks["compute"] + 1
