"""The indexer over chosen keys on a GPU: right compared with float64, the same bits again, linear memory, no waiting.

A step of Megatron's loss by them is in `test_dsa_indexer_streaming.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chosen_keys_cases import Sizes, error, inputs, true_gradients

from megacpp_overlays.kernels.chosen_keys import function as chosen_keys
from megacpp_overlays.kernels.chosen_keys import in_torch, query_blocks, reference
from megacpp_overlays.kernels.index_scores import function as index_scores
from megacpp_overlays.kernels.sparse_attention import tiles

# Triton, inductor and torch's debug modes warn as they like.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

DEVICE = "cuda"
GRID = {
    "as trained": Sizes(1024, 1024, 1, 64, 128, 256, 16, 576, 1024),
    "packed, a batch of two": Sizes(700, 700, 2, 32, 128, 128, 64, 576, 200),
    "many heads": Sizes(515, 520, 1, 8, 64, 100, 128, 192, 515),
    "odd sizes": Sizes(300, 333, 1, 5, 80, 300, 5, 80, 90, weights=torch.float32),
}
CLOSE = 1.1
"""Times PyTorch's own rounding."""


@pytest.fixture(params=GRID)
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sizes:
    """Return sizes of a case that is worked on in several blocks."""
    found = GRID[request.param]
    monkeypatch.setattr(query_blocks, "_BLOCK_BYTES_ON_A_GPU", 4 * found.batch * found.keys * 256)
    for name in ("_LEAST_SLOT_BYTES", "_MOST_SLOT_BYTES"):
        monkeypatch.setattr(tiles, name, 2 * found.chosen * found.dim * 200)
    return found


def chosen(made: Any, sizes: Sizes) -> tuple[Any, Any]:
    found: tuple[Any, Any] = chosen_keys.choose(
        made.q, made.weights, made.k, sizes.chosen, made.starts, made.ends, True
    )
    return found


def test_kernels_take_what_a_model_has() -> None:
    made = inputs(GRID["as trained"], device=DEVICE)
    assert chosen_keys.target_way(made.query, made.key).__name__.endswith("in_triton")
    assert chosen_keys.gradient_way(made.q, made.k).__name__.endswith("in_triton")
    assert chosen_keys.gradient_way(made.q.float(), made.k.float()) is in_torch


def test_choices_are_those_of_all_scores(sizes: Sizes) -> None:
    made = inputs(sizes, device=DEVICE)

    indices, scores = chosen(made, sizes)
    again = chosen(made, sizes)

    whole = index_scores.scores(made.q, made.weights, made.k)
    place = torch.arange(sizes.keys, device=DEVICE)
    hidden = (place < made.starts[:, None]) | (place >= made.ends[:, None])
    best = whole.masked_fill(hidden, -torch.inf).topk(sizes.chosen, dim=-1).values
    there = indices >= 0
    assert torch.equal(scores[there], whole.gather(-1, indices.clamp(min=0))[there])
    ordered = scores.masked_fill(~there, -torch.inf).sort(dim=-1, descending=True).values
    assert torch.equal(ordered, best)
    assert torch.equal(indices, again[0])


def test_targets_are_as_near_as_float32(sizes: Sizes) -> None:
    made = inputs(sizes, device=DEVICE)
    indices, _ = chosen(made, sizes)
    scale = sizes.channels**-0.5

    found = chosen_keys.target(made.query, made.key, indices, scale)

    true = reference.target(made.query.double(), made.key.double(), indices, scale)
    assert error(found, true) <= 3e-7
    assert not found[indices < 0].any()
    assert torch.equal(found, chosen_keys.target(made.query, made.key, indices, scale))


@pytest.mark.parametrize("use_relu", [True, False], ids=["relu", "no relu"])
@pytest.mark.parametrize("common", [0.0, 10.0])
def test_gradients_have_the_errors_of_one_rounding(sizes: Sizes, use_relu: bool, common: float) -> None:
    made = inputs(sizes, common=common, device=DEVICE)
    indices, _ = chosen(made, sizes)

    found = chosen_keys.gradients(made.grad, indices, made.q, made.weights, made.k, use_relu)
    again = chosen_keys.gradients(made.grad, indices, made.q, made.weights, made.k, use_relu)

    true = true_gradients(made, indices, use_relu)
    single = reference.gradients(made.grad, indices, made.q.float(), made.weights.float(), made.k.float(), use_relu)
    for mine, exact, theirs in zip(found, true, single, strict=True):
        assert error(mine, exact) <= 1e-6 + CLOSE * error(theirs.to(mine.dtype), exact)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_rows_are_compared_as_in_pytorch(sizes: Sizes) -> None:
    made = inputs(sizes, device=DEVICE)
    indices, scores = chosen(made, sizes)
    sums = chosen_keys.target(made.query, made.key, indices, sizes.channels**-0.5)
    divergences, differences = reference.compare(scores.double(), sums.double(), indices, 1e-10)

    found = chosen_keys.compare(scores, sums, indices, 1e-10)

    assert error(found, divergences) <= 1e-5
    assert error(scores, differences) <= 1e-6


def step(made: Any, sizes: Sizes) -> tuple[Any, ...]:
    indices, scores = chosen(made, sizes)
    sums = chosen_keys.target(made.query, made.key, indices, sizes.channels**-0.5)
    loss = chosen_keys.compare(scores, sums, indices, 1e-10)
    return loss, *chosen_keys.gradients(scores, indices, made.q, made.weights, made.k, True)


def test_a_step_never_waits_for_the_device_and_can_be_captured() -> None:
    sizes = GRID["as trained"]
    made = inputs(sizes, device=DEVICE)
    step(made, sizes)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(made, sizes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(made, sizes)
    made.q.mul_(-2)

    graph.replay()

    assert all(torch.equal(one, other) for one, other in zip(captured, step(made, sizes), strict=True))


def test_a_compiled_step_gives_the_same_bits() -> None:
    sizes = GRID["as trained"]
    made = inputs(sizes, device=DEVICE)

    compiled = torch.compile(lambda: step(made, sizes), fullgraph=True)

    assert all(torch.equal(one, other) for one, other in zip(compiled(), step(made, sizes), strict=True))


def test_memory_grows_with_tokens_and_not_with_their_square() -> None:
    peaks = []
    for tokens in (16384, 32768):
        sizes = Sizes(tokens, tokens, 1, 64, 128, 512, 16, 576, tokens)
        made = inputs(sizes, device=DEVICE)
        step(made, sizes)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(made, sizes)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 2.1 * peaks[0]
    assert peaks[1] < 4 * 32768**2
