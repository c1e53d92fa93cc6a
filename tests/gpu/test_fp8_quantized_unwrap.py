"""The seam of pack 03 on a GPU: without host synchronisation, under CUDA graph capture, and with tensors of Transformer Engine.

Needs megatron-core. A stand-in that records its arguments replaces TileLang's kernel, except in the last test, which needs TileLang.
The first tests use stand-ins for quantized tensors. Those with real ones are skipped without Transformer Engine.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fp8_dispatch import Kernel, inputs, kernel_in, part_of, quantized, seam_in

from megacpp_overlays.feature_probes import fp8_quantized_unwrap as feature
from megacpp_overlays.kernels.sparse_attention import transformer_engine_keys
from megacpp_overlays.runtime import quantized as facts

pytestmark = [pytest.mark.gpu, pytest.mark.upstream, pytest.mark.filterwarnings("ignore")]

RELEASE = part_of(feature.TARGET.module)
"""The part of the overlay for `ops.tilelang_dsa`."""


@pytest.fixture(scope="module")
def module() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(feature.TARGET.module)


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def on_gpu() -> tuple[Any, ...]:
    return tuple(tensor.cuda() for tensor in inputs())


def dispatch(module: ModuleType, query: Any, key: Any, indices: Any) -> Any:
    return module.fused_sparse_mla_absorbed(query, key, indices, 0.5, 512)  # type: ignore[attr-defined]


def replayed(module: ModuleType, query: Any, key: Any, indices: Any) -> Any:
    """Capture a call of the dispatcher in a CUDA graph, zero its output, and return the output of one replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        dispatch(module, query, key, indices)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = dispatch(module, query, key, indices)
    output.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return output


def test_dequantizing_and_logging_do_not_synchronise_with_the_host(module: ModuleType) -> None:
    query, key, indices = on_gpu()
    pair = quantized(query), quantized(key)
    (replacement,) = RELEASE.replacements[feature.GUARD_FOOLED]
    seam = replacement.make(module.fused_sparse_mla_absorbed, module)  # type: ignore[attr-defined]
    with kernel_in(module, Kernel()), no_synchronisation():
        output = seam(*pair, indices, 0.5, 512)
    assert output is not None


def test_a_replay_with_quantized_tensors_equals_an_eager_call_with_plain_ones(module: ModuleType) -> None:
    query, key, indices = on_gpu()
    with seam_in(module, RELEASE), kernel_in(module, Kernel()) as kernel, torch.no_grad():
        expected = dispatch(module, query, key, indices)
        output = replayed(module, quantized(query), quantized(key), indices)
    assert torch.equal(output, expected)
    assert all(type(tensor) is torch.Tensor and tensor.data_ptr() for pair in kernel.got for tensor in pair)


def test_importing_the_package_does_not_initialise_cuda(run_python: Any) -> None:
    code = "import megacpp_overlays, megacpp_overlays.fp8_sparse_mla, torch; print(torch.cuda.is_initialized())"
    assert run_python(code, Path(__file__).resolve().parents[2]).stdout.splitlines()[-1] == "False"


# With Transformer Engine


@pytest.fixture(scope="module")
def engine() -> SimpleNamespace:
    """Return Transformer Engine, `te`, and for each of its quantizers a function that makes one, `makers`; skip the test without it."""
    name = "transformer_engine.pytorch"
    try:
        te = importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"no {name}: {error}")
    tex = importlib.import_module("transformer_engine_torch")
    e4m3 = tex.DType.kFloat8E4M3
    device = torch.device("cuda")
    makers = {"Float8Tensor": lambda: te.Float8CurrentScalingQuantizer(e4m3, device=device)}
    both = {"rowwise": True, "columnwise": True}
    for cls, options in (("Float8BlockQuantizer", both), ("MXFP8Quantizer", {})):
        if hasattr(te, cls):
            makers[cls] = lambda cls=cls, options=options: getattr(te, cls)(e4m3, **options)
    if hasattr(te, "Float8BlockQuantizer"):
        makers[ROWS] = lambda: te.Float8BlockQuantizer(e4m3, block_scaling_dim=1, **both)
    return SimpleNamespace(te=te, makers=makers)


def engine_tensor(engine: SimpleNamespace, maker: str, plain: Any) -> Any:
    """Return a tensor that a quantizer of the engine quantized; the test is skipped where this GPU cannot quantize or dequantize with it."""
    try:
        made = engine.makers[maker]()(plain)
        made.dequantize()  # Hopper can quantize to MXFP8 and cannot dequantize it
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        pytest.skip(f"this GPU cannot quantize and dequantize with {maker}: {str(error).splitlines()[0]}")
    return made


ROWS = "Float8BlockQuantizer of rows"
MAKERS = ["Float8Tensor", "Float8BlockQuantizer", ROWS, "MXFP8Quantizer"]
STORED = ["Float8Tensor", "Float8BlockQuantizer", ROWS]
"""Quantizers of keys that `transformer_engine_keys` reads without dequantizing."""


@pytest.mark.parametrize("maker", MAKERS)
def test_dequantizing_the_engines_tensors_keeps_their_values_and_gradients(
    maker: str, engine: SimpleNamespace, module: ModuleType
) -> None:
    if maker not in engine.makers:
        pytest.skip(f"this release has no {maker}")
    # 128 rows and 1024 channels are multiples of the block sizes of every recipe. The dispatcher and its shapes play no part here.
    plain = torch.randn(128, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    tensor = engine_tensor(engine, maker, plain)
    assert (tensor.data_ptr(), tensor.dtype) == (0, torch.bfloat16)
    assert facts.is_quantized(tensor)

    opened = facts.dequantized(tensor)

    assert type(opened) is torch.Tensor
    assert torch.equal(opened, tensor.dequantize(dtype=torch.bfloat16))
    error = (opened - plain).float().abs().max() / plain.float().abs().max()
    assert error < 0.07  # E4M3 has 3 mantissa bits: rounding changes a number by 1/16 of it at most
    (opened * 3).sum().backward()
    assert torch.equal(plain.grad, torch.full_like(plain, 3))


@pytest.mark.parametrize("shape", [(128, 2, 1, 576), (130, 2, 1, 640)], ids=str)
@pytest.mark.parametrize("maker", STORED)
def test_keys_that_the_engine_quantized_are_read_without_dequantizing(
    maker: str, shape: tuple[int, ...], engine: SimpleNamespace
) -> None:
    if maker not in engine.makers:
        pytest.skip(f"this release has no {maker}")
    key = engine_tensor(engine, maker, torch.randn(shape, dtype=torch.bfloat16, device="cuda"))

    with no_synchronisation():
        keys = transformer_engine_keys.read(key)

    assert keys is not None
    assert torch.equal(keys.opened(torch.bfloat16), key.dequantize(dtype=torch.bfloat16))


def test_the_seam_keeps_output_and_types_and_passes_gradients_to_the_engines_tensors(
    engine: SimpleNamespace, module: ModuleType
) -> None:
    query, key, indices = on_gpu()
    leaves = query.float().to(torch.bfloat16).requires_grad_(), key.float().to(torch.bfloat16).requires_grad_()
    pair = tuple(engine_tensor(engine, "Float8Tensor", leaf) for leaf in leaves)
    with kernel_in(module, Kernel()) as kernel_without_seam:
        output_without_seam = dispatch(module, *pair, indices)
    with seam_in(module, RELEASE), kernel_in(module, Kernel()) as kernel:
        output = dispatch(module, *pair, indices)
        output.sum().backward()
    assert torch.equal(output, output_without_seam)
    assert [type(tensor) for tensor in kernel.got[0]] == [type(tensor) for tensor in kernel_without_seam.got[0]]
    assert all(leaf.grad is not None and bool(leaf.grad.any()) for leaf in leaves)


def test_a_replay_with_the_engines_tensors_equals_an_eager_call(engine: SimpleNamespace, module: ModuleType) -> None:
    query, key, indices = on_gpu()
    with torch.no_grad():
        pair = tuple(engine_tensor(engine, "Float8Tensor", tensor) for tensor in (query, key))
        with seam_in(module, RELEASE), kernel_in(module, Kernel()):
            expected = dispatch(module, *pair, indices)
            output = replayed(module, *pair, indices)
    assert torch.equal(output, expected)


def test_tilelangs_kernel_computes_the_same_from_the_engines_tensors_as_from_plain_ones(
    engine: SimpleNamespace, module: ModuleType
) -> None:
    if module.SparseMLA is None:  # type: ignore[attr-defined]
        pytest.skip("no TileLang")
    query = torch.randn(64, 2, 16, 576, dtype=torch.bfloat16, device="cuda")
    key = torch.randn(64, 2, 1, 576, dtype=torch.bfloat16, device="cuda")
    indices = torch.arange(64, dtype=torch.int32, device="cuda").expand(2, 64, 64).contiguous()
    with torch.no_grad():
        pair = tuple(engine_tensor(engine, "Float8Tensor", tensor) for tensor in (query, key))
        expected = dispatch(module, *(tensor.dequantize() for tensor in pair), indices)
        with seam_in(module, RELEASE):
            output = dispatch(module, *pair, indices)
    assert torch.equal(output, expected)
