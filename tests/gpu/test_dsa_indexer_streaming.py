"""Pack 12 on a GPU: index scores and their gradients on tensor cores, and a step of Megatron's loss with the overlay.

With `-s` the numbers behind the bounds are printed.
"""

# ruff: noqa: T201 - prints measurements

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import indexer_steps
import pytest
import torch
from index_scores_grid import GRID, LARGEST, NAMES, by_hand, compute, error, four_axes, truths
from indexer_steps import VARIANTS
from places import HANG_S, ROOT, SUPPORT

from megacpp_overlays.kernels.index_scores import function as index_scores
from megacpp_overlays.kernels.index_scores import reference
from megacpp_overlays.kernels.index_scores import streaming as index_scores_streaming

# Triton, inductor and torch's debug modes warn as they like.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

DEVICE = "cuda"
TESTS = SUPPORT
SHARES = 8
MEDIUM = (500, 700, 2, 8, 128)
"""Queries, keys, batch, heads and dim of the tests that are neither about statistics nor about memory."""
WIDE = (16384, 16384, 9, 2, 64)
"""More scores than 2**31."""
FAR = 2**31
"""Elements from one batch element to the next."""
TRAINED = (4096, 4096, 2, 32, 128)
STEP = (1024, 2, 32, 128)
"""Queries, batch, heads and dim of a step through Megatron."""
CLOSE = 1.05
"""Errors of a gradient, in those of rounding the true one once."""


def inputs(*sizes: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Return a gradient, q, weights and k, made on the device."""
    queries, keys, batch, heads, dim = sizes
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shapes = ((queries, batch, heads, dim), (queries, batch, heads), (keys, batch, dim))
    grad = torch.randn(batch, queries, keys, generator=generator, device=DEVICE)
    return [grad, *(torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for shape in shapes)]


def same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# Over sizes, dtypes and layouts


@pytest.fixture(scope="module")
def grid() -> dict[str, Any]:
    """Return the facts of the whole grid; kernels are compiled in several processes at once."""
    path = [str(TESTS), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "MEGACPP_OVERLAYS_LOG": "logging"}

    def share(number: int) -> dict[str, Any]:
        command = [
            sys.executable,
            "-W",
            "ignore",
            str(TESTS / "index_scores_grid.py"),
            DEVICE,
            str(number),
            str(SHARES),
        ]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=HANG_S)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    with ThreadPoolExecutor(SHARES) as threads:
        return {name: facts for found in threads.map(share, range(SHARES)) for name, facts in found.items()}


def test_bfloat16_goes_to_the_tensor_cores() -> None:
    for dim in (64, 80, 96, 128, 192, 256):
        way = index_scores.implementation(torch.bfloat16, torch.bfloat16, dim, torch.device(DEVICE, 0))
        assert way.__name__.endswith("index_scores.in_triton")


@pytest.mark.parametrize("name", GRID)
def test_whole_numbers_come_out_exactly(grid: dict[str, Any], name: str) -> None:
    assert grid[name]["wrong"] == []


@pytest.mark.parametrize("name", [name for name, entry in GRID.items() if entry.is_statistical])
def test_errors_are_those_of_float32_sums_and_one_rounding(grid: dict[str, Any], name: str) -> None:
    found = grid[name]["random"]
    print({tensor: f"{ours:.3e} {bound:.3e} {ours / bound:.3f}" for tensor, (ours, bound) in found.items()})

    limits = dict.fromkeys(NAMES, CLOSE) | {"scores": 2.0, LARGEST: 2.0}
    if GRID[name].weights == torch.float32:
        limits["weights"] = 4.0  # not rounded: compared with autograd in float32
    assert {tensor: ours / bound for tensor, (ours, bound) in found.items() if ours > limits[tensor] * bound} == {}


@pytest.mark.parametrize("place", range(5), ids=["queries", "keys", "batch", "heads", "dim"])
def test_nothing_may_be_given(place: int) -> None:
    tensors = inputs(*(0 if place == at else size for at, size in enumerate((65, 70, 2, 3, 64))))

    found = compute(*tensors)

    assert same(found, tuple(true.to(mine.dtype) for true, mine in zip(truths(*tensors), found, strict=True)))


@pytest.mark.parametrize("use_relu", [True, False], ids=["relu", "no relu"])
def test_what_keys_have_in_common_cancels(use_relu: bool) -> None:
    """The gradient of a softmax adds up to 0 over keys; upstream's float32 sums, rounded once, are the measure."""
    _, q, weights, k = inputs(128, 16384, 1, 4, 128)
    k = k + 10 * torch.randn(128, device=DEVICE, dtype=torch.bfloat16)
    predicted, target = (torch.randn(1, 128, 16384, device=DEVICE).softmax(dim=-1) for _ in range(2))
    grad = (predicted - target) / 128
    theirs = reference.gradients(grad, q.float(), weights.float(), k.float(), use_relu)

    found = index_scores.gradients(grad, q, weights, k, use_relu)

    exact = truths(grad, q, weights, k, use_relu)[1:]
    for name, mine, other, true in zip(NAMES[1:], found, theirs, exact, strict=True):
        assert error(mine, true) <= CLOSE * error(other.to(mine.dtype), true), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes_take_blocks_in_pytorch_and_are_right(dtype: torch.dtype) -> None:
    tensors = inputs(*MEDIUM, dtype=dtype)

    found = compute(*tensors)

    assert index_scores.implementation(dtype, dtype, MEDIUM[-1], torch.device(DEVICE, 0)) is index_scores_streaming
    for mine, true in zip(found, truths(*tensors), strict=True):
        assert error(mine, true) <= 2e-6 + CLOSE * error(true.to(mine.dtype), true)


def test_rows_of_a_context_parallel_rank_are_rows_of_the_whole() -> None:
    """A rank has the first and the last quarter of the queries, and all keys."""
    grad, q, weights, k = inputs(512, 512, 2, 8, 128)
    rows = torch.cat([torch.arange(128), torch.arange(384, 512)]).to(DEVICE)

    whole = compute(grad, q, weights, k)
    part = compute(grad[:, rows], q[rows], weights[rows], k)

    assert torch.equal(part[0], whole[0][:, rows])
    for mine, true in zip(part, truths(grad[:, rows], q[rows], weights[rows], k), strict=True):
        assert error(mine, true) <= 1e-6 + CLOSE * error(true.to(mine.dtype), true)


# The same bits


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Keep the device busy with other work on another stream."""
    if DEVICE == "cpu":
        yield
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        matrix = torch.randn(4096, 4096, device=DEVICE)
        for _ in range(20):
            matrix = (matrix @ matrix).clamp_(-1, 1)
    yield
    stream.synchronize()


def poison() -> None:
    """Leave nothing but NaN in the memory that is allocated next."""
    blocks = [torch.full((2**power,), torch.nan, device=DEVICE) for power in range(8, 25) for _ in range(3)]
    del blocks


def test_reruns_give_the_same_bits_whatever_else_runs_and_lies_in_memory() -> None:
    tensors = inputs(*MEDIUM)
    first = compute(*tensors)

    for rerun in range(20):
        poison()
        with busy() if rerun % 2 else contextlib.nullcontext():
            assert same(compute(*tensors), first), f"rerun {rerun}"
    assert all(bool(each.isfinite().all()) for each in first)


def stepped(tensors: list[torch.Tensor]) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return a step of autograd through the scores: the scores times two, and the gradients."""
    grad, *leaves = tensors
    leaves = [each.requires_grad_() for each in leaves]

    def step() -> tuple[torch.Tensor, ...]:
        found = index_scores.scores(*leaves) * 2
        return found.detach(), *torch.autograd.grad(found, leaves, grad)

    return step


def test_a_captured_step_replays_on_changed_inputs() -> None:
    tensors = inputs(*MEDIUM)
    step = stepped(tensors)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()

    for seed in (2, 3):
        with torch.no_grad():
            for mine, other in zip(tensors, inputs(*MEDIUM, seed=seed), strict=True):
                mine.copy_(other * 10**seed)  # other scales, too
        graph.replay()
        torch.cuda.synchronize()
        assert same(captured, step())


def test_a_compiled_step_gives_the_same_bits() -> None:
    tensors = inputs(*MEDIUM)
    expected = stepped(tensors)()
    grad, *leaves = tensors

    @torch.compile(fullgraph=True)
    def compiled(q: Any, weights: Any, k: Any) -> Any:
        return index_scores.scores(q, weights, k) * 2

    found = compiled(*leaves)

    assert same((found.detach(), *torch.autograd.grad(found, leaves, grad)), expected)


def test_a_step_never_waits_for_the_device() -> None:
    step = stepped(inputs(*MEDIUM))
    step()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_callers_may_write_into_the_scores() -> None:
    grad, *leaves = inputs(*MEDIUM)
    leaves = [each.requires_grad_() for each in leaves]
    plain = torch.autograd.grad(index_scores.scores(*leaves), leaves, grad)
    mask = torch.full((MEDIUM[0], MEDIUM[1]), -torch.inf, device=DEVICE).triu(1)

    scores = index_scores.scores(*leaves)
    scores += mask
    found = torch.autograd.grad(scores, leaves, grad)

    assert same(found, plain)
    assert torch.equal(scores.isinf(), mask.isinf().expand_as(scores))


def test_a_device_that_is_not_the_current_one_computes_the_same() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    tensors = inputs(*MEDIUM)

    found = compute(*(each.to("cuda:1") for each in tensors))

    assert same(tuple(each.to(DEVICE) for each in found), compute(*tensors))


def test_a_call_warns_of_nothing() -> None:
    tensors = inputs(*MEDIUM)
    compute(*tensors)  # Triton may, when it compiles
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute(*tensors)


# Far places


def test_scores_beyond_two_to_the_31_are_right() -> None:
    grad, q, weights, k = inputs(*WIDE)
    batch = WIDE[2]
    assert grad.numel() > 2**31 or DEVICE == "cpu"

    found = compute(grad, q, weights, k)
    last = slice(batch - 1, batch)
    mine = (found[0][last], *(each[:, last] for each in found[1:]))
    del found
    true = truths(grad[last], q[:, last], weights[:, last], k[:, last])

    for name, ours, exact in zip(NAMES, mine, true, strict=True):
        assert error(ours, exact) <= 1e-6 + CLOSE * error(exact.to(ours.dtype), exact), name


def test_inputs_may_lie_further_apart_than_two_to_the_31() -> None:
    grad, q, weights, k = inputs(65, 70, 2, 2, 64)
    memory = torch.empty(FAR + 2**20, dtype=torch.bfloat16, device=DEVICE)
    far_q = memory.as_strided(q.shape, (128, FAR, 64, 1)).copy_(q)
    far_k = memory.as_strided(k.shape, (64, FAR, 1), storage_offset=2**19).copy_(k)

    assert same(compute(grad, far_q, weights, far_k), compute(grad, q, weights, k))


# Compared with upstream's way


def test_the_best_keys_are_upstreams_up_to_rounding() -> None:
    _, q, weights, k = inputs(512, 8192, 1, 32, 128)
    theirs, ours = four_axes(q, weights, k), index_scores.scores(q, weights, k)
    best = theirs.topk(2048).values[..., -1:]

    differ = _chosen(theirs) ^ _chosen(ours)

    # A sum of 32 terms may be off by 31 roundings of their magnitudes, in either way.
    rounding = 2 * 31 * 2.0**-24 * index_scores.scores(q, weights.abs(), k)
    print(f"{int(differ.any(dim=-1).sum())} of 512 rows choose differently")
    assert bool(((theirs - best).abs() <= rounding)[differ].all())
    assert int(differ.sum()) <= differ.numel() // 1000


def _chosen(scores: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(2048).indices, value=True)


@pytest.mark.parametrize("place", range(4), ids=["grad", "q", "weights", "k"])
@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
def test_what_is_no_number_reaches_what_it_reaches_upstream(place: int, spoilt: float) -> None:
    """At least the rows that it reaches through autograd, which stops at closed gates; at most those of the formula by hand."""
    grad, *leaves = tensors = inputs(70, 90, 2, 16, 64)
    tensors[place].view(-1)[1234] = spoilt
    leaves = [each.requires_grad_() for each in leaves]
    theirs = four_axes(*leaves)
    least = torch.autograd.grad(theirs, leaves, grad)
    most = by_hand(grad, *(each.detach() for each in leaves))

    ours = index_scores.scores(*leaves)
    found = torch.autograd.grad(ours, leaves, grad)

    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.isinf(), theirs.isinf())
    for name, *spoilt_rows in zip(NAMES[1:], *map(_not_finite, (least, found, most)), strict=True):
        low, mine, high = spoilt_rows
        assert not bool((low & ~mine).any()), f"it does not reach {name}"
        assert not bool((mine & ~high).any()), f"it reaches too much of {name}"


def _not_finite(gradients: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return for each gradient which queries or keys have something that is no number."""
    return [(~each.isfinite()).flatten(2).any(dim=-1) for each in gradients]


# Memory


def peak_of(work: Callable[[], Any]) -> tuple[int, Any]:
    """Return the bytes that `work` held at once, its result included, and the result."""
    work()  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, result


def test_the_forward_holds_little_beside_its_result() -> None:
    _, *tensors = inputs(*TRAINED)

    peak, scores = peak_of(lambda: index_scores.scores(*tensors))

    assert scores.nbytes <= peak <= 1.05 * scores.nbytes


def test_the_backward_holds_less_than_two_score_matrices_beside_its_results() -> None:
    grad, *tensors = inputs(*TRAINED)

    peak, gradients = peak_of(lambda: index_scores.gradients(grad, *tensors))

    print(f"{peak / 2**20:.0f} MiB, of them {sum(each.nbytes for each in gradients) / 2**20:.0f} results")
    assert peak <= sum(each.nbytes for each in gradients) + 2 * grad.nbytes


# Through Megatron


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of steps of Megatron's loss with the overlay and without, in two processes at once."""
    folder = tmp_path_factory.mktemp("steps")
    path = [str(TESTS), str(ROOT), os.environ.get("PYTHONPATH", "")]

    def run(mode: str) -> Any:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "MEGACPP_OVERLAYS_LOG": "logging"}
        sizes = ",".join(map(str, STEP))
        command = [sys.executable, "-W", "ignore", indexer_steps.__file__, DEVICE, sizes, str(folder / mode)]
        done = subprocess.run(
            command, env={**env, "MEGACPP_OVERLAYS": mode}, capture_output=True, text=True, check=False, timeout=HANG_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return torch.load(folder / mode)

    with ThreadPoolExecutor(2) as threads:
        return dict(zip(("auto", "off"), threads.map(run, ("auto", "off")), strict=True))


@pytest.mark.upstream
@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_of_megatron_gives_the_same_loss_and_gradients(steps: dict[str, Any], name: str) -> None:
    ours, theirs = (steps[mode]["steps"][name]["found"] for mode in ("auto", "off"))

    assert (steps["auto"]["decision"], steps["off"]["decision"]) == ("active", "disabled")
    assert steps["auto"]["steps"][name]["same bits"]
    away = [error(mine, other.double()) for mine, other in zip(ours, theirs, strict=True)]
    print(f"relative differences from upstream: {', '.join(f'{each:.1e}' for each in away)}")
    # Two roundings to bfloat16; a sparse loss may also choose another key where two scores are alike.
    of_loss, of_gradients = (1e-5, 1e-2) if VARIANTS[name]["sparse_loss"] else (1e-6, 4e-3)
    assert away[0] <= of_loss
    assert max(away[1:]) <= of_gradients
    if VARIANTS[name]["sparse_loss"]:
        return
    true = indexer_steps.truth(*indexer_steps.inputs_of(*STEP, DEVICE), use_relu=VARIANTS[name]["use_relu"])
    for mine, other, exact in zip(ours, theirs, (each.cpu() for each in true), strict=True):
        assert error(mine, exact) <= 1e-6 + CLOSE * error(other, exact)


@pytest.mark.upstream
def test_a_step_of_megatron_needs_no_four_axis_tensor(steps: dict[str, Any]) -> None:
    queries, batch, heads, _ = STEP
    four_axis_bytes = 4 * queries * batch * heads * queries

    for name in VARIANTS:
        with_it, without = (steps[mode]["steps"][name]["peak"] for mode in ("auto", "off"))
        print(f"{name}: {with_it / 2**20:.0f} MiB with the overlay, {without / 2**20:.0f} without")
        assert with_it < four_axis_bytes <= without
