"""Attention of transformers on a GPU whose cuDNN fails: gradients without the overlay and with it, and how often cuDNN is asked."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from placed_seams import placed
from places import ROOT
from torch.utils.checkpoint import checkpoint

from megacpp_overlays.feature_probes.cudnn_sdpa_query_gradient import AS_TORCH_PREFERS, TARGET
from megacpp_overlays.overlays import cudnn_sdpa_query_gradient as overlay
from megacpp_overlays.repro import Blocked
from megacpp_overlays.repro.neighbour import load_file

pytestmark = [pytest.mark.gpu, pytest.mark.upstream, pytest.mark.filterwarnings("ignore")]

pytest.importorskip("transformers")
MODULE: Any = importlib.import_module(TARGET.module)
PACK = load_file(ROOT / "packs" / "74-cudnn-sdpa-query-gradient" / "reproduce.py")


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The kernels that cuDNN was asked about, with an empty cache of answers and the seam placed."""
    try:
        PACK._ask_cudnn(queries=192, keys=192, has_mask=True)
    except Blocked as reason:
        pytest.skip(str(reason))
    seen: list[Any] = []
    ask = overlay._ask

    def note(kernel: Any) -> None:
        seen.append(kernel)
        ask(kernel)

    monkeypatch.setattr(overlay, "_known", {})
    monkeypatch.setattr(overlay, "_ask", note)
    with placed(overlay.OVERLAY, AS_TORCH_PREFERS, MODULE):
        yield seen
    torch._dynamo.reset()


def attended(layer: Any, *given: torch.Tensor) -> Any:
    return MODULE.sdpa_attention_forward(layer, *given)[0]


def run(rows: int = 192, call: Callable[..., Any] = attended, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return the output of attention over as many rows, and the gradient of its query."""
    given = [each.to(dtype).requires_grad_() for each in PACK.tensors(rows, rows)]
    output = call(torch.nn.Module(), *given, torch.ones((rows, rows), dtype=torch.bool, device="cuda").tril())
    output.backward(torch.ones_like(output))
    return {"output": output.detach(), "query": given[0].grad[..., 1:]}


def assert_right(found: dict[str, Any], rows: int = 192) -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        right = run(rows, dtype=torch.float32)
    assert all(PACK.apart(found[name], each) < PACK.TOLERANCE for name, each in right.items())


def test_cudnn_stays_where_it_is_said_to_be_right_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlay, "_is_finite", lambda *_: True)

    found = run()

    assert torch.isfinite(found["output"]).all()
    assert not torch.isfinite(found["query"]).all()


@pytest.mark.parametrize("has_mask", [False, True])
def test_a_whole_tile_of_keys_is_right_and_half_of_one_is_not(has_mask: bool) -> None:
    for size, dtype in ((64, torch.bfloat16), (128, torch.float16)):
        kernel = overlay._CudnnKernel(0, dtype, size, 64)
        assert [overlay._is_finite(kernel, keys, has_mask) for keys in (64, 128)] == [False, True]
        assert not overlay._is_finite(kernel._replace(queries=1), 128, has_mask)


CALLS: dict[str, Callable[..., Any]] = {
    "eager": lambda: attended,
    "compiled": lambda: torch.compile(attended, fullgraph=True, dynamic=True),
    "checkpointed": lambda: lambda *given: checkpoint(attended, *given, use_reentrant=False),
    "checkpointed-reentrant": lambda: lambda *given: checkpoint(attended, *given, use_reentrant=True),
}


@pytest.mark.parametrize("call", CALLS)
def test_gradients_are_right_and_cudnn_is_asked_once_without_a_trace(asked: list[Any], call: str) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    backends = torch.nn.attention._cur_sdpa_kernel_backends()
    made = CALLS[call]()
    found = {rows: run(rows, made) for rows in (192, 320, 448)}

    after = torch.cuda.get_rng_state(), torch.get_rng_state()
    assert len(asked) == 1
    assert torch.nn.attention._cur_sdpa_kernel_backends() == backends
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    for rows, each in found.items():
        assert_right(each, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_decides_the_dtype(dtype: torch.dtype) -> None:
    with torch.autocast("cuda", dtype):
        found = run(dtype=torch.float32)
    assert_right(found)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_captured_graph_has_no_cudnn_and_asks_it_nothing(asked: list[Any], is_known: bool) -> None:
    with torch.cuda.stream(torch.cuda.Stream()) if is_known else nullcontext():
        run()
    torch.cuda.synchronize()
    if not is_known:
        overlay._known.clear()
    asked.clear()
    graph, given = torch.cuda.CUDAGraph(), [each.requires_grad_() for each in PACK.tensors(192, 192)]
    mask = torch.ones((192, 192), dtype=torch.bool, device="cuda").tril()

    with torch.cuda.graph(graph):
        output = attended(torch.nn.Module(), *given, mask)
        found = torch.autograd.grad(output, given, torch.ones_like(output))
    graph.replay()
    torch.cuda.synchronize()

    assert not asked
    assert_right({"output": output.detach(), "query": found[0][..., 1:]})
