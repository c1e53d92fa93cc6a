"""The k largest of each row on a GPU: the same positions as by sorting, at every length, and nothing that waits.

With `-s` the lengths and kinds are printed as they are done.
"""

# ruff: noqa: T201 - prints the cases that were done

from __future__ import annotations

from typing import Any

import pytest
import torch
from top_k_cases import DTYPES, KINDS, rows, some_of

from megacpp_overlays.kernels.top_k import function as top_k
from megacpp_overlays.kernels.top_k import in_torch, in_triton

# Triton, inductor and torch's debug modes warn as they like.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

DEVICE = "cuda"
KEYS = (1, 2, 31, 32, 33, 127, 500, 512, 513, 1024, 2000, 4095, 4096, 4097, 8192, 10000, 16384, 16385, 32767, 32768)
TRAINED = {"4096 keys": (4096, 4096, 2048), "32768 keys": (4096, 32768, 2048)}
"""Rows, keys and how many are chosen."""


def assert_right(scores: Any, k: int, label: str) -> None:
    """Hold both ways to write to sorting on the CPU, whose order of zeros and NaNs is not one of bits."""
    expected = [in_torch.choose(scores.cpu(), k, marked) for marked in (False, True)]
    found = [top_k.choose(scores, k, mark_infinite=marked).cpu() for marked in (False, True)]
    print(f"{label}: {k} of {tuple(scores.shape)}")
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_go_to_the_kernel_unless_too_many_are_chosen_of_long_ones(dtype: torch.dtype) -> None:
    device = torch.device(DEVICE, 0)
    ways = {top_k.implementation(dtype, keys, keys, device).__name__.rpartition(".")[2] for keys in KEYS}
    assert ways == {"in_triton"}
    assert top_k.implementation(dtype, 131072, 16384, device).__name__.endswith("in_triton")
    assert top_k.implementation(dtype, 32769, 16385, device) is in_torch


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_those_by_sorting(kind: str, keys: int) -> None:
    scores = rows(kind, 2, 5, keys, device=DEVICE)
    for k in some_of(keys):
        assert_right(scores, k, kind)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_right_too(kind: str, dtype: torch.dtype) -> None:
    assert_right(rows(kind, 9, 3000, dtype=dtype, device=DEVICE), 1100, f"{kind}, {dtype}")


@pytest.mark.parametrize("kind", ["normal", "whole", "causal", "NaNs"])
@pytest.mark.parametrize("name", TRAINED)
def test_sizes_of_a_model_are_right(name: str, kind: str) -> None:
    many, keys, k = TRAINED[name]
    scores = rows(kind, many, keys, device=DEVICE)

    found = top_k.choose(scores, k)

    assert torch.equal(found, in_torch.choose(scores, k, False))
    numbers = scores.topk(k, dim=-1).values
    taken = scores.gather(-1, found).sort(dim=-1, descending=True).values
    assert torch.equal(taken.nan_to_num(nan=torch.inf), numbers.nan_to_num(nan=torch.inf))


@pytest.mark.parametrize(("keys", "k"), [(32769, 2048), (131072, 2048), (100000, 1), (65536, 16384)])
@pytest.mark.parametrize("kind", KINDS)
def test_longer_rows_are_chosen_from_stretch_by_stretch(kind: str, keys: int, k: int) -> None:
    assert_right(rows(kind, 1, 3, keys, device=DEVICE), k, kind)


@pytest.mark.parametrize("keys", [4096, 40000, 131072])
def test_bounds_are_those_of_a_mask(keys: int) -> None:
    scores = rows("whole", 2, 5, keys, device=DEVICE)
    starts, ends = (
        torch.tensor(each, dtype=torch.int32, device=DEVICE)
        for each in ([0, 7, 300, 3000, 9], [keys, 17, 300, keys - 3, 4001])
    )

    found = in_triton.choose(scores, 1000, True, (starts, ends))

    assert torch.equal(found, in_torch.choose(scores, 1000, True, (starts, ends)))


def test_other_dtypes_and_most_of_long_rows_are_sorted() -> None:
    assert_right(rows("whole", 3, 400, device=DEVICE).double(), 100, "float64")
    assert_right(rows("NaNs", 3, 40000, device=DEVICE), 20000, "most of longer rows with NaNs")


@pytest.mark.parametrize("kind", KINDS)
def test_reruns_give_the_same_bits_whatever_lies_in_memory(kind: str) -> None:
    scores = rows(kind, 64, 4096, device=DEVICE)
    first = top_k.choose(scores, 2048, mark_infinite=True)
    for _ in range(10):
        poison = [
            torch.full((2**power,), -7, dtype=torch.int64, device=DEVICE) for power in range(8, 22) for _ in range(3)
        ]
        del poison
        assert torch.equal(top_k.choose(scores, 2048, mark_infinite=True), first)


@pytest.mark.parametrize("keys", [100, 4096, 32768])
def test_a_call_never_waits_for_the_device_and_can_be_captured(keys: int) -> None:
    scores, k = rows("causal", 40, keys, device=DEVICE), keys // 2
    top_k.choose(scores, k, mark_infinite=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        top_k.choose(scores, k, mark_infinite=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = top_k.choose(scores, k, mark_infinite=True)
    scores.copy_(-2 * scores)

    graph.replay()

    assert torch.equal(captured, top_k.choose(scores, k, mark_infinite=True))


def test_a_compiled_call_gives_the_same_positions() -> None:
    scores = rows("whole", 40, 500, device=DEVICE)

    compiled = torch.compile(lambda x: top_k.choose(x * 2, 100) + 1, fullgraph=True)

    assert torch.equal(compiled(scores), top_k.choose(scores, 100) + 1)


def test_rows_may_lie_further_apart_than_two_to_the_31() -> None:
    scores = rows("whole", 2, 700, device=DEVICE)
    memory = torch.empty(2**31 + 2**20, device=DEVICE)
    far = memory.as_strided(scores.shape, (2**31, 1)).copy_(scores)

    assert torch.equal(top_k.choose(far, 300), top_k.choose(scores, 300))


def test_a_result_beyond_two_to_the_31_is_right() -> None:
    scores = rows("whole", 1, 4096, device=DEVICE)
    many = torch.zeros((2**31 // 4096 + 2, 4096), dtype=torch.bfloat16, device=DEVICE)
    many[-1] = scores[0].to(many.dtype)

    assert torch.equal(top_k.choose(many, 4096)[-1], torch.arange(4096, device=DEVICE))
    assert torch.equal(top_k.choose(many[-1:], 2048), top_k.choose(scores.to(many.dtype), 2048))


def test_only_the_positions_take_memory() -> None:
    scores = rows("normal", 4096, 4096, device=DEVICE)
    top_k.choose(scores, 2048)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    found = top_k.choose(scores, 2048)

    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before == found.numel() * found.element_size()
