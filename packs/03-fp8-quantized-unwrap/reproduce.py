"""What the fused SparseMLA kernel gets when a projection leaves the query and the key quantized.

A recorder stands in front of the kernel. The dispatcher is called as its backend calls it, and what arrives is looked
at: a null pointer, a tensor that some operation dequantized on its way, or one that was dequantized on purpose.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

PACKAGE = "megatron.core.transformer.experimental_attention_variant"
DISPATCHERS = (
    (f"{PACKAGE}.ops.tilelang_dsa", "fused_sparse_mla_absorbed"),
    (f"{PACKAGE}.dsa", "_fused_sparse_mla_absorbed"),
)
ROWS, BATCH, HEADS, CHANNELS, VALUES, TOPK = 64, 2, 16, 576, 512, 64


def _dispatcher() -> tuple[Any, str]:
    """Return the module and the name of the dispatcher of this tree."""
    for name, symbol in DISPATCHERS:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as missing:
            if missing.name is None or not name.startswith(missing.name):
                raise
            continue
        if hasattr(module, symbol):
            return module, symbol
    raise TargetAbsent("megatron-core has no dispatcher of a fused SparseMLA kernel here")


class _Recorder:
    """Stands in front of the kernel. A null pointer goes no further, and without a kernel the output is zeros."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.got: list[tuple[Any, Any]] = []

    def apply(self, query: Any, key: Any, indices: Any, scale: float) -> Any:
        import torch

        self.got.append((query, key))
        if self.kernel is not None and query.data_ptr() and key.data_ptr():
            return self.kernel.apply(query, key, indices, scale)
        output = torch.zeros(*query.shape[:-1], VALUES, dtype=torch.bfloat16, device=query.device)
        return output, output[..., 0].float()


def _measure(quantize: Callable[[Any], Any], device: str, *, with_kernel: bool) -> Behaviour:
    """Call the dispatcher with a quantized query and key.

    Args:
        quantize: makes a quantized tensor of a bf16 one.
        device: where the tensors are.
        with_kernel: whether the kernel itself runs behind the recorder.
    """
    import torch

    module, symbol = _dispatcher()
    kernel = module.SparseMLA if with_kernel else None
    if with_kernel and kernel is None:
        raise Blocked("the kernel of this megatron-core needs TileLang")
    generator = torch.Generator(device).manual_seed(0)
    plain = [
        torch.randn(ROWS, BATCH, heads, CHANNELS, generator=generator, device=device).to(torch.bfloat16)
        for heads in (HEADS, 1)
    ]
    query, key = (quantize(tensor) for tensor in plain)
    indices = torch.arange(TOPK, dtype=torch.int32, device=device).expand(BATCH, ROWS, TOPK).contiguous()
    on_purpose: list[str] = []
    cls, recorder, before = type(query), _Recorder(kernel), module.SparseMLA
    original = cls.dequantize

    @functools.wraps(original)
    def dequantize(tensor: Any, **options: Any) -> Any:
        if not _within_dispatch():
            on_purpose.append(type(tensor).__name__)
        return original(tensor, **options)

    cls.dequantize, module.SparseMLA = dequantize, recorder
    try:
        output = getattr(module, symbol)(query, key, indices, CHANNELS**-0.5, VALUES)
    finally:
        cls.dequantize, module.SparseMLA = original, before
    return _judge(cls, recorder.got, output, len(on_purpose))


def _within_dispatch() -> bool:
    """Return whether an operation on the tensor is what dequantizes it."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - who calls is the question
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__":
            return True
        frame = frame.f_back
    return False


def _judge(cls: type, got: list[tuple[Any, Any]], output: Any, on_purpose: int) -> Behaviour:
    name = cls.__name__
    if not got:
        kind = "declines" if output is None else "answers itself for"
        return Behaviour(broken=False, seen=f"the dispatcher {kind} a {name}; the kernel is not called")
    tensors = [tensor for pair in got for tensor in pair]
    null = sum(tensor.data_ptr() == 0 for tensor in tensors)
    seen = f"of {len(tensors)} tensors that the kernel gets, {null} are a {name} with data_ptr() 0"
    seen += f"; {on_purpose} of 2 were dequantized on purpose"
    return Behaviour(broken=null > 0 or on_purpose < 2, seen=seen)


@functools.cache
def _stand_in_class() -> Any:
    """Return a minimal class that behaves like a Float8Tensor: a stand-in, where Transformer Engine is missing.

    It says bf16 and has no storage, slices and `contiguous` stay what they are, anything else dequantizes.
    """
    import torch

    aten = torch.ops.aten
    stay = {aten.select.int, aten.slice.Tensor, aten.view.default, aten.detach.default, aten.clone.default}

    class StandInFloat8(torch.Tensor):  # type: ignore[misc] # torch is not seen by the type checker
        payload: Any

        @staticmethod
        def __new__(cls: Any, payload: Any) -> Any:
            make = torch.Tensor._make_wrapper_subclass  # noqa: SLF001 - how torch documents wrapper subclasses
            made = make(cls, payload.shape, dtype=torch.bfloat16, device=payload.device)
            made.payload = payload
            return made

        def contiguous(self, *_: Any, **__: Any) -> Any:
            return self

        def dequantize(self, **_: Any) -> Any:
            return self.payload.to(torch.bfloat16)

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in stay:
                return cls(function(args[0].payload, *args[1:], **(kwargs or {})))
            plain = [each.dequantize() if isinstance(each, cls) else each for each in args]
            return function(*plain, **(kwargs or {}))

        __torch_function__ = torch._C._disabled_torch_function_impl  # noqa: SLF001 - as upstream's

    return StandInFloat8


def _stand_in(plain: Any) -> Any:
    import torch

    return _stand_in_class()(plain.to(torch.float8_e4m3fn))


def _engine() -> Any:
    import torch  # noqa: F401 - brings the libraries that the engine's own are linked against

    try:
        engine = importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        raise Blocked(f"transformer-engine cannot be imported: {str(error).splitlines()[0]}") from error
    return engine


def _float8_on_cpu(plain: Any) -> Any:
    """Return a Float8Tensor with scale 1, put together without the GPU kernel that quantizes."""
    import torch

    tex = importlib.import_module("transformer_engine_torch")
    return _engine().Float8Tensor(
        shape=plain.shape,
        dtype=plain.dtype,
        data=plain.to(torch.float8_e4m3fn).view(torch.uint8),
        fp8_scale_inv=torch.ones(1, device=plain.device),
        fp8_dtype=tex.DType.kFloat8E4M3,
        device=plain.device,
    )


def _quantized_on_gpu(plain: Any) -> Any:
    """Return what Transformer Engine makes of a tensor with current scaling."""
    import torch

    tex = importlib.import_module("transformer_engine_torch")
    quantizer = _engine().Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, device=torch.device(plain.device))
    return quantizer(plain)


def _run_stand_in() -> Behaviour:
    return _measure(_stand_in, "cpu", with_kernel=False)


def _run_engine_on_cpu() -> Behaviour:
    _engine()
    return _measure(_float8_on_cpu, "cpu", with_kernel=False)


def _run_engine_on_gpu() -> Behaviour:
    _engine()
    return _measure(_quantized_on_gpu, "cuda", with_kernel=False)


def _run_engine_with_kernel() -> Behaviour:
    _engine()
    return _measure(_quantized_on_gpu, "cuda", with_kernel=True)


def _case(name: str, device: str, run: Callable[[], Behaviour], *versions: str) -> Case:
    return Case(
        name=name,
        overlay="fp8-quantized-unwrap",
        device=device,
        versions=("torch", "megatron-core", *versions),
        run=run,
    )


CASES = (
    _case("wrapper-stand-in", "cpu", _run_stand_in),
    _case("transformer-engine-on-cpu", "cpu", _run_engine_on_cpu, "transformer-engine", "transformer-engine-torch"),
    _case("transformer-engine-on-gpu", "cuda", _run_engine_on_gpu, "transformer-engine", "transformer-engine-torch"),
    _case("transformer-engine-with-tilelang", "cuda", _run_engine_with_kernel, "transformer-engine", "transformer-engine-torch", "tilelang"),
)
