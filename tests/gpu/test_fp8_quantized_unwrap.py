"""The seam of pack 03 on a GPU: no host synchronisation, under CUDA graph capture, and with the real engine if it is here.

Needs megatron-core. Without TileLang a recorder replaces its kernel. Without Transformer Engine a stand-in wrapper replaces
its tensors, and the tests of the engine are skipped.
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
    """Capture the dispatcher and return its output after a replay."""
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


def test_opening_and_saying_so_reads_nothing_back(module: ModuleType) -> None:
    query, key, indices = on_gpu()
    pair = quantized(query), quantized(key)
    (replacement,) = RELEASE.replacements[feature.GUARD_FOOLED]
    fresh = replacement.make(module.fused_sparse_mla_absorbed, module)  # type: ignore[attr-defined]
    with kernel_in(module, Kernel()), no_synchronisation():
        output = fresh(*pair, indices, 0.5, 512)
    assert output is not None


def test_a_captured_call_replays_what_the_plain_one_computes(module: ModuleType) -> None:
    query, key, indices = on_gpu()
    with seam_in(module, RELEASE), kernel_in(module, Kernel()) as kernel, torch.no_grad():
        expected = dispatch(module, query, key, indices)
        output = replayed(module, quantized(query), quantized(key), indices)
    assert torch.equal(output, expected)
    assert all(type(tensor) is torch.Tensor and tensor.data_ptr() for pair in kernel.got for tensor in pair)


def test_importing_the_package_leaves_cuda_alone(run_python: Any) -> None:
    code = "import megacpp_overlays, megacpp_overlays.fp8_sparse_mla, torch; print(torch.cuda.is_initialized())"
    assert run_python(code, Path(__file__).resolve().parents[2]).stdout.splitlines()[-1] == "False"


# With the real engine


@pytest.fixture(scope="module")
def engine() -> SimpleNamespace:
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
    try:
        made = engine.makers[maker]()(plain)
        made.dequantize()  # Hopper can make MXFP8 tensors and cannot open them
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        pytest.skip(f"this GPU cannot quantize and dequantize with {maker}: {str(error).splitlines()[0]}")
    return made


ROWS = "Float8BlockQuantizer of rows"
MAKERS = ["Float8Tensor", "Float8BlockQuantizer", ROWS, "MXFP8Quantizer"]
STORED = ["Float8Tensor", "Float8BlockQuantizer", ROWS]


@pytest.mark.parametrize("maker", MAKERS)
def test_the_engines_own_tensors_are_opened_once_with_their_gradient(
    maker: str, engine: SimpleNamespace, module: ModuleType
) -> None:
    if maker not in engine.makers:
        pytest.skip(f"this release has no {maker}")
    # 128 rows and 1024 channels divide the blocks of every recipe; the dispatcher is not about shapes here.
    plain = torch.randn(128, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    tensor = engine_tensor(engine, maker, plain)
    assert (tensor.data_ptr(), tensor.dtype) == (0, torch.bfloat16)
    assert facts.is_quantized(tensor)

    opened = facts.dequantized(tensor)

    assert type(opened) is torch.Tensor
    assert torch.equal(opened, tensor.dequantize(dtype=torch.bfloat16))
    error = (opened - plain).float().abs().max() / plain.float().abs().max()
    assert error < 0.07  # half a step of E4M3 at the top of its range
    (opened * 3).sum().backward()
    assert torch.equal(plain.grad, torch.full_like(plain, 3))


@pytest.mark.parametrize("shape", [(128, 2, 1, 576), (130, 2, 1, 640)], ids=str)
@pytest.mark.parametrize("maker", STORED)
def test_keys_that_the_engine_quantized_are_read_as_they_are_stored(
    maker: str, shape: tuple[int, ...], engine: SimpleNamespace
) -> None:
    if maker not in engine.makers:
        pytest.skip(f"this release has no {maker}")
    key = engine_tensor(engine, maker, torch.randn(shape, dtype=torch.bfloat16, device="cuda"))

    with no_synchronisation():
        keys = transformer_engine_keys.read(key)

    assert keys is not None
    assert torch.equal(keys.opened(torch.bfloat16), key.dequantize(dtype=torch.bfloat16))


def test_the_seam_gives_the_engines_tensors_to_the_kernel_plain(engine: SimpleNamespace, module: ModuleType) -> None:
    query, key, indices = on_gpu()
    leaves = query.float().to(torch.bfloat16).requires_grad_(), key.float().to(torch.bfloat16).requires_grad_()
    pair = tuple(engine_tensor(engine, "Float8Tensor", leaf) for leaf in leaves)
    with kernel_in(module, Kernel()) as without:
        silent = dispatch(module, *pair, indices)
    with seam_in(module, RELEASE), kernel_in(module, Kernel()) as kernel:
        output = dispatch(module, *pair, indices)
        output.sum().backward()
    assert torch.equal(output, silent)
    assert [type(tensor) for tensor in kernel.got[0]] == [type(tensor) for tensor in without.got[0]]
    assert all(leaf.grad is not None and bool(leaf.grad.any()) for leaf in leaves)


def test_the_engines_tensors_under_capture(engine: SimpleNamespace, module: ModuleType) -> None:
    query, key, indices = on_gpu()
    with torch.no_grad():
        pair = tuple(engine_tensor(engine, "Float8Tensor", tensor) for tensor in (query, key))
        with seam_in(module, RELEASE), kernel_in(module, Kernel()):
            expected = dispatch(module, *pair, indices)
            output = replayed(module, *pair, indices)
    assert torch.equal(output, expected)


def test_with_tilelang_the_real_kernel_gets_what_it_can_read(engine: SimpleNamespace, module: ModuleType) -> None:
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
