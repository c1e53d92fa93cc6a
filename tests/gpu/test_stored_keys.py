"""Keys as Transformer Engine stores them, on Hopper: values, gradients, no host synchronisation, and CUDA graphs.

Its classes are those of 2.20.2 without their compiled half, so only a wheel of it is needed. `test_fp8_quantized_unwrap.py`
reads tensors that the compiled half quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fp8_engine
import pytest
import torch
from stored_keys import BF16, LAYOUTS

from megacpp_overlays.kernels.sparse_attention import transformer_engine_keys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.upstream,
    pytest.mark.filterwarnings("ignore"),  # upstream's own deprecations
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="the kernels are for Hopper"
    ),
]

DEVICE, QUERIES, BATCH, KEYS, DIM, SLOTS, VALUE = "cuda", 64, 2, 515, 576, 128, 512


@pytest.fixture(scope="module")
def engine(wheel: Callable[[str, str], Path]) -> SimpleNamespace:
    with fp8_engine.loaded(wheel("transformer-engine", "2.20.2")) as found:
        return found  # no longer where Triton would look for a device


def made(layout: str, engine: SimpleNamespace) -> Any:
    with torch.device(DEVICE):
        return LAYOUTS[layout](engine, KEYS, BATCH, 1, DIM, requires_grad=True)


def asked(heads: int) -> tuple[Any, Any]:
    generator = torch.Generator(DEVICE).manual_seed(1)
    query = torch.randn(QUERIES, BATCH, heads, DIM, generator=generator, device=DEVICE).to(BF16).requires_grad_()
    chosen = torch.rand(BATCH, QUERIES, KEYS, generator=generator, device=DEVICE).topk(SLOTS).indices.int()
    return query, chosen


def step(query: Any, key: Any, chosen: Any) -> list[Any]:
    output = transformer_engine_keys.attend(query, key, chosen, 0.1, VALUE)
    return [output.detach(), *torch.autograd.grad(output.float().square().sum(), [query, key])]


@pytest.mark.parametrize("heads", [16, 128], ids=["plainer kernels", "warps share out the work"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stored_key_is_as_its_numbers_in_the_dtype_of_the_query(
    layout: str, heads: int, engine: SimpleNamespace
) -> None:
    key, (query, chosen) = made(layout, engine), asked(heads)
    keys = transformer_engine_keys.read(key)
    assert keys is not None
    plain = keys.opened(BF16).detach().requires_grad_()

    found = step(query, key, chosen)

    output, _ = transformer_engine_keys.function.attend(query, plain, chosen, 0.1, VALUE)
    expected = [output.detach(), *torch.autograd.grad(output.float().square().sum(), [query, plain])]
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert (one - other).float().norm() <= 4e-3 * other.float().norm()  # tiles, and so sums, may be of other sizes
        assert heads == 16 or torch.equal(one, other)  # where keys are opened before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_waits_for_the_device_and_a_graph_replays_the_step(layout: str, engine: SimpleNamespace) -> None:
    key, (query, chosen) = made(layout, engine), asked(128)
    expected = step(query, key, chosen)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(query, key, chosen)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step(query, key, chosen)
    for each in replayed:
        each.zero_()

    graph.replay()
    torch.cuda.synchronize()

    assert all(torch.equal(one, other) for one, other in zip(replayed, expected, strict=True))
