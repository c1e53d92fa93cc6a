"""Attention over chosen keys on Hopper: kernels of both kinds, the same bits again, CUDA graphs, bounded memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sparse_attention_cases import GRID, PEAKED, Entry, as_opened, errors, in_dtype, inputs, results

from megacpp_overlays.kernels.sparse_attention import function, in_triton, reference
from megacpp_overlays.kernels.sparse_attention.quantized_keys import QuantizedKeys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # Triton and inductor warn as they like
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="the kernels are for Hopper"
    ),
]

LARGE = {
    "576 of 512": Entry(6, 2, 128, 576, 3000, 2048, 512, dtype=torch.bfloat16),
    "576 of 512, odd heads and slots": Entry(9, 1, 100, 576, 700, 333, 512, sink=True, dtype=torch.bfloat16),
    "320 of 256": Entry(16, 1, 64, 320, 300, 256, 256, dtype=torch.bfloat16),
    "192 of 128": Entry(8, 2, 64, 192, 300, 128, 128, sink=True, indices=torch.int32, dtype=torch.bfloat16),
    "128 of 128": Entry(8, 1, 128, 128, 100, 72, 128, dtype=torch.bfloat16),
    "640 of 512": Entry(8, 1, 64, 640, 256, 128, 512, dtype=torch.bfloat16),
    "576 of 576": Entry(4, 1, 64, 576, 256, 128, 576, dtype=torch.bfloat16),
    "208 of 208": Entry(8, 1, 64, 208, 256, 128, 208, dtype=torch.bfloat16),
    "float16": Entry(8, 1, 128, 576, 256, 128, 512),
    "a bias": Entry(8, 1, 128, 576, 256, 128, 512, bias=True, dtype=torch.bfloat16),
    "a bias, 640 of 512": Entry(4, 1, 128, 640, 256, 128, 512, bias=True, dtype=torch.bfloat16),
    "640 of 640": Entry(4, 1, 64, 640, 256, 128, 640, dtype=torch.bfloat16),
    "16 heads": Entry(8, 1, 16, 576, 256, 128, 512, dtype=torch.bfloat16),
    "a scale for all, 576 of 512": Entry(9, 1, 128, 576, 700, 333, 512, dtype=torch.bfloat16, scales="all"),
    "a scale for each key, 576 of 512": Entry(
        6, 2, 100, 576, 700, 256, 512, sink=True, dtype=torch.bfloat16, scales="key"
    ),
    "scales of blocks, 576 of 512": Entry(6, 2, 128, 576, 700, 256, 512, dtype=torch.bfloat16, scales="blocks"),
    "scales of blocks, 16 heads": Entry(6, 2, 16, 576, 700, 256, 512, sink=True, dtype=torch.bfloat16, scales="blocks"),
    "a scale for each key, 32 heads": Entry(8, 1, 32, 576, 300, 128, 512, dtype=torch.bfloat16, scales="key"),
    "scales of blocks and a bias": Entry(
        8, 1, 128, 576, 256, 128, 512, bias=True, dtype=torch.bfloat16, scales="blocks"
    ),
    "scales of blocks, 640 of 640": Entry(4, 1, 64, 640, 256, 128, 640, dtype=torch.bfloat16, scales="blocks"),
    "a scale for each key, 512 of 512 and a bias": Entry(
        4, 1, 64, 512, 256, 128, 512, bias=True, dtype=torch.bfloat16, scales="key"
    ),
    "scales of blocks, float16, strided": Entry(8, 1, 16, 192, 256, 128, 128, strided=True, scales="blocks"),
    "long lists of a key": Entry(700, 1, 64, 192, 40, 40, 128, dtype=torch.bfloat16),
}

_WAYS: dict[str, dict[str, float]] = {
    **{f"queries x {sharpness}": {"sharpness": sharpness} for sharpness in (1, 4, 16, 64)},
    **{f"a slot {ahead} ahead": {"ahead": ahead} for ahead in (4, 7, 10)},
    "values with much in common": {"common": 10},
}
LARGE_AND_PEAKED = {
    f"{way}, {heads} heads, {dim} of {value}, {str(dtype)[6:]}": Entry(
        17, 1, heads, dim, 4096, 2048, value, dtype=dtype, **given
    )
    for way, given in _WAYS.items()
    for heads in (16, 64, 128)
    for dim, value in ((576, 512), (320, 256))
    for dtype in (torch.bfloat16, torch.float16)
    # In float16 values with much in common leave gradients of queries 10 times as far from float64 as PyTorch's: weights are
    # rounded when they are multiplied, and not when gradients are taken.
    if not (dtype is torch.float16 and "common" in given)
}


def assert_errors_are_those_of_torch(made: dict[str, Any]) -> None:
    """Where the truth is zero, nothing but zero is near enough."""
    found = results(function.attend, made, None)

    true = results(reference.attend, made, torch.float64)
    plain = errors(results(reference.attend, made, None), true)
    for tensor, error in errors(found, true).items():
        assert error <= max(1.1 * plain[tensor], 1e-5), tensor


@pytest.mark.parametrize("name", [*GRID, *LARGE])
def test_errors_are_at_most_those_of_torch_in_the_same_dtype(name: str) -> None:
    made = inputs((GRID | LARGE)[name], device="cuda")

    assert_errors_are_those_of_torch(made)


@pytest.mark.parametrize("name", [*PEAKED, *LARGE_AND_PEAKED])
def test_peaked_attention_is_rounded_no_more_than_pytorch_rounds_it(name: str) -> None:
    made = inputs((PEAKED | LARGE_AND_PEAKED)[name], device="cuda")
    made["above_lse"].zero_()

    found = results(function.attend, made, None)

    true = results(reference.attend, made, torch.float64)
    plain = errors(results(in_dtype, made, None), true)
    for tensor, error in errors(found, true).items():
        assert error <= max(1.1 * plain[tensor], 1e-5), tensor


@pytest.mark.parametrize("name", ["576 of 512", "16 heads"])
@pytest.mark.parametrize("sign", [-1, 0])
def test_a_scale_that_turns_or_stops_scores_is_as_exact(sign: int, name: str) -> None:
    made = inputs(LARGE[name], device="cuda")
    made["given"]["scale"] *= sign

    assert_errors_are_those_of_torch(made)


@pytest.mark.parametrize("reads", [0, math.inf], ids=["opened", "read as they are"])
@pytest.mark.parametrize("name", [name for name, entry in LARGE.items() if entry.scales])
def test_quantized_keys_are_the_numbers_that_they_stand_for(
    name: str, reads: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = inputs(LARGE[name], device="cuda")
    monkeypatch.setattr(in_triton, "_READS_WORTH_OPENING", reads)

    found = results(function.attend, made, None)

    # Tiles may be of another size, so sums may be in another order.
    for tensor, error in errors(found, as_opened(made)).items():
        assert error <= (1e-5 if tensor == "lse" else 4e-3), tensor


def test_each_bit_pattern_is_read_as_torch_reads_it() -> None:
    bits = torch.arange(256, dtype=torch.uint8, device="cuda")
    bits = bits[bits & 127 != 127].view(-1, 1, 1, 1).expand(-1, 1, 1, 16).contiguous()
    query = torch.ones(254, 1, 16, 16, dtype=torch.bfloat16, device="cuda")
    each_its_own = torch.arange(254, device="cuda").view(1, 254, 1)

    output, _ = function.attend(query, QuantizedKeys(bits, torch.tensor(0.25, device="cuda")), each_its_own, 0.0, 16)

    assert torch.equal(output[:, 0, 0], bits[:, 0, 0].view(torch.float8_e4m3fn).bfloat16() / 4)


def test_quantized_keys_that_few_queries_read_are_not_opened() -> None:
    keys, dim = 1 << 17, 576
    data = torch.ones(keys, 1, 1, dim, device="cuda").to(torch.float8_e4m3fn)
    query = torch.randn(64, 1, 16, dim, device="cuda").bfloat16()
    indices = torch.randint(keys, (1, 64, 256), device="cuda")
    given = (query, QuantizedKeys(data, torch.ones(keys, 1, 5, device="cuda")), indices, 0.04, 512)
    function.attend(*given)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    function.attend(*given)

    assert torch.cuda.max_memory_allocated() - before < data.numel()  # as bfloat16 they are twice that


@pytest.mark.parametrize("name", LARGE)
def test_a_rerun_gives_the_same_bits(name: str) -> None:
    made = inputs(LARGE[name], device="cuda")

    once, again = (results(function.attend, made, None) for _ in range(2))

    for tensor, each in once.items():
        assert torch.equal(each, again[tensor]), tensor


def test_a_step_is_captured_and_replayed_with_other_choices() -> None:
    made = inputs(LARGE["320 of 256"], device="cuda")
    given = made["given"] | {name: made["given"][name].requires_grad_() for name in ("query", "key")}

    def step() -> tuple[torch.Tensor, ...]:
        output, lse = function.attend(**given)
        return output, lse, *torch.autograd.grad(output, (given["query"], given["key"]), made["above"])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()

    given["indices"].copy_(given["indices"].roll(7, dims=1))
    graph.replay()

    for one, other in zip(captured, step(), strict=True):
        assert torch.equal(one, other)


def test_memory_does_not_grow_with_queries_times_keys() -> None:
    entry = Entry(2048, 1, 128, 576, 8192, 1024, 512, dtype=torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(0)
    query, key = (
        torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16).requires_grad_()
        for shape in ((2048, 1, 128, 576), (8192, 1, 1, 576))
    )
    indices = torch.rand(1, 2048, 8192, generator=generator, device="cuda").topk(1024).indices
    above = torch.ones(2048, 1, 128, 512, dtype=torch.bfloat16, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    output, _ = function.attend(query, key, indices, entry.dim**-0.5, entry.value)
    output.backward(above)

    gradients = (query.grad.nbytes + output.nbytes) * 2
    assert torch.cuda.max_memory_allocated() - before < gradients + (5 << 29)  # 8 GiB are one tensor of scores
