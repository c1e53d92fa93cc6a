"""The attention target on a GPU: probabilities summed over heads on tensor cores, in bounds, order and memory.

A step of Megatron's loss by them is in `test_dsa_indexer_streaming.py`. With `-s` the numbers behind the bounds are printed.
"""

# ruff: noqa: T201 - prints measurements

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_target_cases import SIZES, VALID, inputs, seen, share, valid_of

from megacpp_overlays.kernels.attention_target import function as attention_target
from megacpp_overlays.kernels.attention_target import streaming

# Triton, inductor and torch's debug modes warn as they like.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

DEVICE = "cuda"
GRID = {
    **SIZES,
    "several tiles": (600, 700, 2, 5, 128),
    "several tiles, dim 192": (600, 700, 2, 5, 192),
    "several tiles, dim 576": (600, 700, 2, 3, 576),
    "aligned": (1024, 1024, 2, 16, 128),
}
TRAINED = (4096, 4096, 2, 16, 128)
MATRIX = 4 * TRAINED[0] * TRAINED[1] * TRAINED[2]
"""Bytes of (batch, queries, keys) in float32."""
FAR = 2**31
"""Elements from one batch element to the next."""


def asked(name: str, kind: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any, float, dict[str, Any]]:
    sizes = GRID[name]
    valid = valid_of(kind, *sizes[:3], device=DEVICE)
    return *inputs(1, *sizes, dtype=dtype, device=DEVICE), sizes[4] ** -0.5, valid


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_goes_to_the_tensor_cores(dtype: torch.dtype) -> None:
    for dim in (64, 192, 576):
        way = attention_target.implementation(dtype, dtype, dim, torch.device(DEVICE, 0))
        assert way.__name__.endswith("attention_target.in_triton")


@pytest.mark.parametrize("kind", VALID)
@pytest.mark.parametrize("name", GRID)
def test_errors_are_those_of_float32_sums(name: str, kind: str) -> None:
    query, key, scale, valid = asked(name, kind)

    found = attention_target.target(query, key, scale, **valid)

    of_allowed = share(found, query, key, scale, valid)
    print(f"{name}, {kind}: {of_allowed:.4f} of the allowed error")
    assert of_allowed <= 1
    assert not found[~seen(valid, *GRID[name][:3])].any()


@pytest.mark.parametrize("kind", VALID)
def test_float16_and_one_head_of_keys_are_right_too(kind: str) -> None:
    query, key, scale, valid = asked("several tiles", kind, torch.float16)
    for keys in (key, key[:, :, :1]):
        found = attention_target.target(query, keys, scale, **valid)
        assert share(found, query, keys, scale, valid) <= 1


def test_float32_takes_blocks_in_pytorch() -> None:
    query, key, scale, valid = asked("odd", "packed", torch.float32)
    way = attention_target.implementation(query.dtype, key.dtype, 80, torch.device(DEVICE, 0))
    assert way is streaming
    assert share(attention_target.target(query, key, scale, **valid), query, key, scale, valid) <= 1


@pytest.mark.parametrize("name", GRID)
def test_a_support_of_all_keys_gives_the_bits_of_none(name: str) -> None:
    query, key, scale, valid = asked(name, "causal")
    queries, keys, batch = GRID[name][:3]
    every = torch.rand((batch, queries, keys), device=DEVICE).argsort(dim=-1)

    found = attention_target.target(query, key, scale, **valid, topk_indices=every)

    assert torch.equal(found, attention_target.target(query, key, scale, **valid))


@pytest.mark.parametrize("kind", VALID)
def test_reruns_give_the_same_bits_whatever_lies_in_memory(kind: str) -> None:
    query, key, scale, valid = asked("several tiles", kind)
    first = attention_target.target(query, key, scale, **valid)
    for _ in range(10):
        poison = [torch.full((2**power,), torch.nan, device=DEVICE) for power in range(8, 25) for _ in range(3)]
        del poison
        assert torch.equal(attention_target.target(query, key, scale, **valid), first)


@pytest.mark.parametrize("kind", VALID)
def test_a_call_never_waits_for_the_device_and_can_be_captured(kind: str) -> None:
    query, key, scale, valid = asked("several tiles", kind)
    attention_target.target(query, key, scale, **valid)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention_target.target(query, key, scale, **valid)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention_target.target(query, key, scale, **valid)
    query.copy_(-2 * query)

    graph.replay()

    assert torch.equal(captured, attention_target.target(query, key, scale, **valid))


def test_inputs_may_lie_further_apart_than_two_to_the_31() -> None:
    query, key = inputs(2, 65, 70, 2, 2, 64, device=DEVICE)
    valid = valid_of("causal", 65, 70, 2, device=DEVICE)
    memory = torch.empty(FAR + 2**20, dtype=torch.bfloat16, device=DEVICE)
    far_query = memory.as_strided(query.shape, (128, FAR, 64, 1)).copy_(query)
    far_key = memory.as_strided(key.shape, (128, FAR, 64, 1), storage_offset=2**19).copy_(key)

    found = attention_target.target(far_query, far_key, 0.1, **valid)

    assert torch.equal(found, attention_target.target(query, key, 0.1, **valid))


def test_a_result_beyond_two_to_the_31_is_right() -> None:
    sizes = (16384, 16384, 9, 1, 16)
    query, key = (torch.randn(sizes[0], sizes[2], 1, sizes[4], device=DEVICE).bfloat16() for _ in range(2))
    valid = valid_of("causal", *sizes[:3], device=DEVICE)

    found = attention_target.target(query, key, 0.25, **valid)[-1].clone()

    alone = attention_target.target(query[:, -1:], key[:, -1:], 0.25, **valid)[0]
    assert torch.equal(found, alone)


def peak_of(work: Any) -> tuple[int, Any]:
    """Return the bytes that `work` held at once, its result included, and the result."""
    work()  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, result


def test_little_is_held_beside_the_result() -> None:
    query, key = inputs(3, *TRAINED, device=DEVICE)
    valid = valid_of("causal", *TRAINED[:3], device=DEVICE)

    peak, result = peak_of(lambda: attention_target.target(query, key, 0.1, **valid))

    assert result.nbytes == MATRIX <= peak <= 1.05 * MATRIX
