"""Linear cross entropy on a GPU: right at the sizes of models, bounded, capturable, and the same every time.

With `-s` the numbers behind the bounds are printed.
"""

# ruff: noqa: T201 - prints measurements

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from linear_cross_entropy_cases import IGNORED, Inputs, call, capture, draw, error, errors, found, leaves_of, truth
from places import ROOT, SUPPORT
from torch.nn import functional

from megacpp_overlays.kernels.linear_cross_entropy import memory as linear_cross_entropy_memory
from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory
from megacpp_overlays.kernels.linear_cross_entropy.parallel import Group, Layer, Terms, backward_pass, forward_pass
from megacpp_overlays.kernels.linear_cross_entropy.shard import GradientRequest
from megacpp_overlays.kernels.vocabulary_softmax import passes as vocabulary_softmax

# Triton and torch's debug modes warn as they like.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

DEVICE = "cuda"
MIB = 2**20
WAYS = {"recompute": Memory(block_classes=4096), "keep": Memory(logits="keep")}
ODD = (1000, 520, 70001)
EVERY = {
    "bias": True,
    "class_weight": True,
    "label_smoothing": 0.1,
    "softcap": 5.0,
    "lse_square_scale": 1e-3,
    "ignore_index": 7,
}
CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "none": (ODD, {}),
    "mean": (ODD, {"reduction": "mean"}),
    "every option": (ODD, EVERY),
    "every option, mean": (ODD, {**EVERY, "reduction": "mean"}),
    "bias and smoothing, sum": (ODD, {"bias": True, "label_smoothing": 0.2, "reduction": "sum"}),
    "the largest vocabulary": ((512, 256, 262144), {}),
    "one token": ((1, 520, 5003), EVERY),
    "one feature": ((100, 1, 1000), {}),
    "one class": ((64, 32, 1), {}),
    "more tokens than a grid has rows": ((70000, 16, 300), {"reduction": "mean"}),
}
LIMITS = {torch.bfloat16: (1e-3, 1e-2), torch.float16: (2e-4, 2e-3), torch.float32: (1e-5, 1e-5)}
"""Largest relative error of a loss and of a gradient. Logits, their gradient and the result are rounded once each."""
MODELS = [(8192, 4096, 131072), (12288, 4096, 151552)]
MEDIUM = (2048, 1024, 32001)


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    """Leave no memory to the next test, and no setting."""
    yield
    torch.cuda.set_sync_debug_mode("default")
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(params=WAYS)
def memory(request: pytest.FixtureRequest) -> Memory:
    return WAYS[request.param]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Results


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_float64(name: str, dtype: torch.dtype) -> None:
    sizes, options = CASES[name]
    inputs = draw(*sizes, dtype=dtype, device=DEVICE, **options)
    if dtype == torch.float16 and inputs.reduction == "mean":
        inputs.arriving = inputs.arriving * 2**10  # as a loss scale does: float16 holds nothing below 6e-8
    true = truth(inputs)

    for way, packed in product(WAYS, (False, True)):
        if packed:
            inputs.hidden, inputs.weight = inputs.hidden.contiguous(), inputs.weight.contiguous()
        seen = errors(found(inputs, memory=WAYS[way]), true)

        print(name, dtype, way, "packed" * packed, {each: f"{value:.1e}" for each, value in seen.items()})
        of_loss, of_gradient = LIMITS[dtype]
        assert {each: value for each, value in seen.items() if not value < of_gradient} == {}
        assert seen["loss"] < of_loss


@pytest.mark.parametrize("packed", [False, True])
def test_under_autocast_products_are_of_bfloat16_and_gradients_of_float32(packed: bool, memory: Memory) -> None:
    inputs = draw(*ODD, dtype=torch.float32, device=DEVICE, bias=True)
    if packed:
        inputs.hidden, inputs.weight = inputs.hidden.contiguous(), inputs.weight.contiguous()

    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        seen = found(inputs, memory=memory)

    assert {each.dtype for each in seen.values()} == {torch.float32}
    rounded = replace(inputs, hidden=inputs.hidden.bfloat16(), weight=inputs.weight.bfloat16())
    assert max(errors(seen, truth(rounded)).values()) < LIMITS[torch.bfloat16][1]


def test_gradients_are_as_good_as_those_of_pytorch_s_own_loss(memory: Memory) -> None:
    """Its logits are rounded to bfloat16 and widened, as in most training code."""
    inputs = draw(*MEDIUM, dtype=torch.bfloat16, device=DEVICE)
    inputs.hidden, inputs.weight = inputs.hidden.contiguous(), inputs.weight.contiguous()
    true = truth(inputs)
    leaves = leaves_of(inputs)
    logits = (inputs.hidden @ inputs.weight.t()).float()
    functional.cross_entropy(logits, inputs.target, reduction="none").backward(inputs.arriving)
    eager = {name: error(leaf.grad, true[name]) for name, leaf in leaves.items() if leaf.grad is not None}
    del logits

    seen = errors(found(inputs, memory=memory), true)

    print(eager, seen)
    assert eager.keys() == {"hidden", "weight"}
    for name, limit in eager.items():
        assert seen[name] < 1.05 * limit, name


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("tokens", [0, 300])
def test_a_batch_without_a_token_that_counts_gives_zeros(tokens: int, reduction: str, memory: Memory) -> None:
    inputs = draw(tokens, 520, 5003, dtype=torch.bfloat16, device=DEVICE, reduction=reduction, bias=True)
    inputs.target.fill_(IGNORED)

    seen = found(inputs, memory=memory)

    loss = seen.pop("loss")
    assert loss.isnan().all() if reduction == "mean" else not loss.any()
    assert {name: each.shape for name, each in seen.items()} == {
        name: leaf.shape for name, leaf in leaves_of(inputs).items()
    }
    assert not any(each.any() for each in seen.values())


def test_infinite_logits_of_an_ignored_token_do_not_spread(memory: Memory) -> None:
    inputs = draw(200, 520, 5003, dtype=torch.bfloat16, device=DEVICE, **EVERY)
    true = truth(inputs)
    inputs.hidden, inputs.arriving = inputs.hidden.clone(), inputs.arriving.clone()
    inputs.hidden[1] = 3e38
    inputs.arriving[1] = float("nan")

    seen = found(inputs, memory=memory)

    assert seen["loss"][1] == 0.0
    assert not seen["hidden"][1].any()
    assert max(errors(seen, true).values()) < LIMITS[torch.bfloat16][1]


def test_the_weight_gradients_of_two_micro_batches_are_added_up_in_main_grad(memory: Memory) -> None:
    main_grad = torch.zeros(70001, 520, device=DEVICE)
    expected = torch.zeros(70001, 520, device=DEVICE, dtype=torch.float64)

    for seed in (1, 2):
        inputs = draw(*ODD, seed=seed, dtype=torch.bfloat16, device=DEVICE)
        expected += truth(inputs)["weight"]
        leaves = leaves_of(inputs)
        call(inputs, memory=memory, main_grad=main_grad).backward(inputs.arriving)
        assert leaves["weight"].grad is None
        assert leaves["hidden"].grad is not None

    assert error(main_grad, expected) < LIMITS[torch.bfloat16][1]


def test_logits_of_more_than_two_to_the_31_elements(memory: Memory) -> None:
    inputs = draw(16500, 64, 131072, dtype=torch.bfloat16, device=DEVICE)
    assert inputs.target.numel() * inputs.weight.shape[0] > 2**31
    if memory.logits == "recompute":
        memory = Memory(block_classes=131072)
    last = slice(-100, None)
    tail = Inputs(inputs.hidden[last], inputs.weight, inputs.target[last], inputs.arriving[last])
    true = truth(tail)

    seen = found(inputs, memory=memory)

    assert error(seen["loss"][last], true["loss"]) < LIMITS[torch.bfloat16][0]
    assert error(seen["hidden"][last], true["hidden"]) < LIMITS[torch.bfloat16][1]


@pytest.mark.parametrize("classes", [1000, 8192, 20001, 70001])
def test_a_block_is_narrowed_in_its_own_memory_as_it_is_outside_of_it(classes: int) -> None:
    """Each row of float32 logits becomes the bfloat16 gradient at its start, which other threads still read."""
    tokens = 4000
    generator = torch.Generator(DEVICE).manual_seed(1)
    block = torch.randn(tokens, classes + 7, device=DEVICE, generator=generator)
    logits = block[:, :classes]
    labels = torch.randint(0, classes, (tokens,), device=DEVICE, generator=generator)
    statistics = vocabulary_softmax.room_for_statistics(tokens, torch.device(DEVICE))
    vocabulary_softmax.add_statistics(logits, labels, 0, statistics, first=True)
    factor = torch.rand(tokens, device=DEVICE, generator=generator)
    coefficients = vocabulary_softmax.Coefficients(statistics.lse, factor, factor)
    apart = torch.empty(tokens, classes, dtype=torch.bfloat16, device=DEVICE)
    vocabulary_softmax.logits_gradient(logits, labels, 0, coefficients, apart)
    expected = (torch.softmax(logits, dim=1) - functional.one_hot(labels, classes)) * factor.unsqueeze(1)

    within = block.view(torch.bfloat16)[:, :classes]
    vocabulary_softmax.logits_gradient(logits, labels, 0, coefficients, within)

    assert error(apart, expected) < 5e-3
    assert torch.equal(within, apart)


def test_logits_wider_than_the_hidden_states_give_the_loss_of_float32() -> None:
    """As the entry for Megatron's dispatcher asks for them: each block becomes gradients in its own memory."""
    inputs = draw(*MEDIUM, dtype=torch.bfloat16, device=DEVICE)
    rows = inputs.hidden.contiguous()
    layer, terms, memory = Layer(weight=inputs.weight, logits_dtype=torch.float32), Terms(), WAYS["recompute"]

    forward = forward_pass(rows, inputs.target, layer, terms, Group(), memory)
    hidden, weight, _ = backward_pass(
        inputs.arriving, rows, inputs.target, forward.statistics, layer, terms, Group(), memory, GradientRequest()
    )

    assert hidden is not None
    assert weight is not None
    seen = errors({"loss": forward.losses, "hidden": hidden, "weight": weight}, truth(inputs))
    print(seen)
    assert seen["loss"] < LIMITS[torch.float32][0]
    assert max(seen.values()) < LIMITS[torch.bfloat16][1]


# How it runs


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("logits", ["recompute", "keep", "auto"])
def test_a_step_never_waits_for_the_host(logits: str, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy_memory, "_room_was_found", None)
    inputs = draw(512, 256, 4001, dtype=torch.bfloat16, device=DEVICE, **EVERY, reduction=reduction)
    main_grad = torch.zeros(4001, 256, device=DEVICE)
    memory = Memory(extra_mib=1, logits=logits)
    expected = found(inputs, memory=memory)  # programs are compiled
    torch.cuda.synchronize()

    torch.cuda.set_sync_debug_mode("error")
    seen = found(inputs, memory=memory)
    call(inputs, memory=memory, main_grad=main_grad).backward(inputs.arriving)
    torch.cuda.set_sync_debug_mode("default")

    assert same(seen, expected)


@pytest.mark.parametrize("options", [{}, {**EVERY, "reduction": "mean"}], ids=["none", "every option, mean"])
def test_a_captured_step_replays_on_new_inputs_as_it_runs_outside(options: dict[str, Any], memory: Memory) -> None:
    inputs = draw(1000, 520, 12007, dtype=torch.bfloat16, device=DEVICE, **options)
    leaves_of(inputs)
    static = {each.name: getattr(inputs, each.name) for each in fields(inputs)}
    static = {name: each for name, each in static.items() if isinstance(each, torch.Tensor)}

    captured = capture(lambda: found(inputs, memory=memory))

    for seed in (5, 6):
        fresh = draw(1000, 520, 12007, dtype=torch.bfloat16, device=DEVICE, seed=seed, **options)
        with torch.no_grad():
            for name, each in static.items():
                each.copy_(getattr(fresh, name))
        expected = found(fresh, memory=memory)
        assert same(captured(), expected)


def test_replays_add_to_main_grad_each_time(memory: Memory) -> None:
    inputs = draw(1000, 520, 12007, dtype=torch.bfloat16, device=DEVICE)
    inputs.hidden = inputs.hidden.detach().requires_grad_()
    inputs.weight = inputs.weight.detach().requires_grad_()
    main_grad = torch.zeros(12007, 520, device=DEVICE)

    def step() -> dict[str, torch.Tensor]:
        loss = call(inputs, memory=memory, main_grad=main_grad)
        (slope,) = torch.autograd.grad(loss, (inputs.hidden, inputs.weight), inputs.arriving, allow_unused=True)[:1]
        return {"loss": loss.detach(), "hidden": slope}

    replay = capture(step)
    main_grad.zero_()
    for _ in range(3):
        replay()

    assert error(main_grad / 3, truth(inputs)["weight"]) < LIMITS[torch.bfloat16][1]


@pytest.mark.parametrize("options", [{}, {**EVERY, "reduction": "mean"}], ids=["none", "every option, mean"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_a_step_that_is_repeated_gives_the_same_bits(
    dtype: torch.dtype, options: dict[str, Any], memory: Memory
) -> None:
    inputs = draw(*ODD, dtype=dtype, device=DEVICE, **options)
    first = found(inputs, memory=memory)

    assert all(same(first, found(inputs, memory=memory)) for _ in range(3))


def test_streams_other_than_the_default_one_give_the_same_bits(memory: Memory) -> None:
    """One for the forward, another for the call of the backward pass."""
    inputs = draw(*MEDIUM, dtype=torch.bfloat16, device=DEVICE, **EVERY)
    expected = found(inputs, memory=memory)
    leaves = leaves_of(inputs)
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()

    with torch.cuda.stream(one):
        loss = call(inputs, memory=memory)
    other.wait_stream(one)
    with torch.cuda.stream(other):
        slopes = torch.autograd.grad(loss, list(leaves.values()), inputs.arriving)
    torch.cuda.synchronize()

    assert same({"loss": loss.detach(), **dict(zip(leaves, slopes, strict=True))}, expected)


def test_deterministic_algorithms_are_all_that_is_used(run_python: Callable[..., Any]) -> None:
    """In a process of its own, because cuBLAS reads its variable once."""
    code = """
import torch
from linear_cross_entropy_cases import draw, errors, found, truth
from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory
options = dict(bias=True, class_weight=True, label_smoothing=0.1, softcap=5.0, lse_square_scale=1e-3)
for memory in (Memory(extra_mib=1), Memory(logits="keep")):
    for reduction in ("none", "mean"):
        inputs = draw(500, 264, 9001, dtype=torch.bfloat16, device="cuda", reduction=reduction, **options)
        true = truth(inputs)
        torch.use_deterministic_algorithms(True)
        first, second = found(inputs, memory=memory), found(inputs, memory=memory)
        assert max(errors(first, true).values()) < 1e-2, errors(first, true)
        assert all(torch.equal(first[name], second[name]) for name in first)
        torch.use_deterministic_algorithms(False)
print("done")
"""
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "MEGACPP_OVERLAYS_LOG": "logging", "PYTHONWARNINGS": "ignore"}

    done = run_python(code, Path(ROOT), SUPPORT, **variables)

    assert done.stdout.splitlines()[-1] == "done"


def test_a_device_that_is_not_the_current_one_can_be_used(memory: Memory) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    inputs = draw(1000, 520, 12007, dtype=torch.bfloat16, device="cuda:1", **EVERY)
    with torch.cuda.device(1):
        expected = found(inputs, memory=memory)

    assert torch.cuda.current_device() == 0
    seen = found(inputs, memory=memory)

    assert torch.cuda.current_device() == 0
    assert {each.device.index for each in seen.values()} == {1}
    assert same(seen, expected)


# Memory


def extra_mib(step: Callable[[], list[torch.Tensor]]) -> float:
    """Return the peak memory of a step in MiB, less its results and the memory allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = step()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    return (taken - sum(each.numel() * each.element_size() for each in results)) / MIB


def extra_peaks(sizes: tuple[int, int, int], memory: Memory, reduction: str = "none") -> dict[str, float]:
    """Return the MiB of a whole step, of a forward pass, and of one without gradients."""
    small = draw(64, 64, 512, dtype=torch.bfloat16, device=DEVICE, reduction=reduction)
    for choice in (Memory(block_classes=256), memory):
        found(small, memory=choice)  # so that cuBLAS has its workspaces, for both threads
    tokens, hidden, classes = sizes
    generator = torch.Generator(DEVICE).manual_seed(1)
    leaves = [
        torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16, generator=generator).requires_grad_()
        for rows in (tokens, classes)
    ]
    target = torch.randint(0, classes, (tokens,), device=DEVICE, generator=generator)
    arriving = torch.rand((tokens,) if reduction == "none" else (), device=DEVICE, generator=generator)
    inputs = Inputs(*leaves, target, arriving, reduction=reduction)

    def step() -> list[torch.Tensor]:
        loss = call(inputs, memory=memory)
        return [loss.detach(), *torch.autograd.grad(loss, leaves, arriving)]

    with torch.no_grad():
        evaluation = extra_mib(lambda: [call(inputs, memory=memory)])
    found_ = {"step": extra_mib(step), "forward": extra_mib(lambda: [call(inputs, memory=memory)])}
    print(sizes, memory.logits.value, reduction, found_, evaluation)
    return {**found_, "evaluation": evaluation}


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("sizes", MODELS, ids=str)
def test_a_step_takes_256_mib_at_most(sizes: tuple[int, int, int], reduction: str) -> None:
    peaks = extra_peaks(sizes, Memory(), reduction)

    assert peaks["step"] <= 256
    # A few numbers a token, in addition to a block that has the 256 MiB to itself.
    assert max(peaks["forward"], peaks["evaluation"]) <= 256 + 4


@pytest.mark.parametrize("sizes", MODELS, ids=str)
def test_logits_that_are_kept_are_all_that_is_taken(sizes: tuple[int, int, int]) -> None:
    tokens, _, classes = sizes
    logits = tokens * classes * 2 / MIB

    peaks = extra_peaks(sizes, Memory(logits="keep"))

    assert peaks["step"] <= logits + 64
    assert peaks["forward"] <= logits + 64
    assert peaks["evaluation"] <= 256 + 4


def test_less_memory_can_be_asked_for() -> None:
    """A few numbers a token come on top of it."""
    assert extra_peaks((4096, 1024, 131072), Memory(extra_mib=32))["step"] <= 32 + 2


def test_logits_are_kept_if_there_is_room_for_them_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    automatic, device = Memory(logits="auto"), torch.device(DEVICE)
    capacity = torch.cuda.get_device_properties(device).total_memory
    for classes, expected in ((1000, True), (capacity // 1000, False)):
        monkeypatch.setattr(linear_cross_entropy_memory, "_room_was_found", None)

        assert automatic.keeps(1000, classes, 2, device) is expected
        assert automatic.keeps(1, 1, 2, device) is expected  # chosen once
