"""Quantized query and key tensors at the dispatcher of the fused SparseMLA kernel.

A quantized tensor of Transformer Engine looks like bf16 (see `megacpp_overlays.runtime.quantized`). Depending on the tree the
dispatcher passes its null pointer to the kernel, or dequantizes it by accident and the run silently loses FP8.
The seam checks the query and the key first. Plain tensors are passed on, at the cost of comparing two types.
A quantized one goes to the registered FP8-aware kernel (`megacpp_overlays.fp8_sparse_mla`), or is dequantized
once, with its gradient, and a line is logged once per tensor and recipe, on every rank. Everything else stays upstream's, refusals
included: where upstream declines, its caller gets the quantized tensors as before.

The dispatcher lived in two modules, so the overlay has two parts.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megacpp_overlays.feature_probes import fp8_quantized_unwrap as feature
from megacpp_overlays.model import Finding, Observation, Overlay, Replacement, Target, Thread
from megacpp_overlays.source.trees import SourceTree

ID = "fp8-quantized-unwrap"
_SWAPPING = threading.Lock()


def _unwrapping(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    import torch

    from megacpp_overlays import fp8_sparse_mla
    from megacpp_overlays.runtime import dynamo, quantized

    order = list(inspect.signature(original).parameters)
    places = tuple((name, order.index(name)) for name in feature.TENSORS)
    plain = (torch.Tensor, torch.nn.Parameter)
    where = f"{original.__module__}.{original.__qualname__}"
    said: set[tuple[str, type, str, bool]] = set()

    def say(tensors: dict[str, Any], outcome: Callable[[Any], str], *, declined: bool = False) -> None:
        for name, tensor in tensors.items():
            recipe = quantized.recipe(tensor)
            # A call that upstream declined must not hide the first one that lost FP8.
            if (key := (name, type(tensor), recipe, declined)) not in said:
                said.add(key)
                held = f"{type(tensor).__name__} ({recipe}) of {quantized.payload_bytes(tensor)} bytes"
                _log(f"{ID}: the {name} of {where} came as {held}; {outcome(tensor)}")

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        found: dict[str, Any] = {}
        for name, place in places:
            value = args[place] if place < len(args) else kwargs.get(name)
            if type(value) not in plain and quantized.is_quantized(value):
                found[name] = value
        if not found:
            return original(*args, **kwargs)
        is_test = any(type(tensor).__module__ == __name__ for tensor in found.values())
        kernel = None if is_test else fp8_sparse_mla.registered()
        if kernel is not None and (output := kernel(*args, **kwargs)) is not None:
            say(found, lambda _: f"handed as it is to {fp8_sparse_mla.name_of(kernel)}")
            return output
        if getattr(module, feature.KERNEL) is None:
            return original(*args, **kwargs)  # which declines whatever it is given
        opened = {name: quantized.dequantized(tensor) for name, tensor in found.items()}
        given = [opened.get(order[place], value) for place, value in enumerate(args)]
        output = original(*given, **{name: opened.get(name, value) for name, value in kwargs.items()})
        if not is_test and output is None:
            say(found, lambda tensor: f"dequantized to {_size(tensor)}, but upstream declined it", declined=True)
        elif not is_test:
            say(found, lambda tensor: f"dequantized to {_size(tensor)}, because no FP8-aware SparseMLA took it")
        return output

    return dynamo.only_inlined(dispatch)


def _size(tensor: Any) -> str:
    return f"{tensor.numel() * tensor.dtype.itemsize} bytes of {str(tensor.dtype).removeprefix('torch.')} at each call"


def _log(text: str) -> None:
    """Warn on every rank: with pipeline parallelism rank 0 may have none of the layers that lose FP8."""
    from torch import distributed

    together = distributed.is_available() and distributed.is_initialized()
    rank = f"rank {distributed.get_rank()}: " if together else ""
    logging.getLogger("megacpp_overlays").warning("[megacpp_overlays] %s%s", rank, text)


def observe(module: ModuleType, symbol: str) -> Observation:
    """Call the dispatcher that callers reach with quantized query and key, and inspect the arguments of the kernel.

    The kernel is TileLang's and may be missing, so a recorder replaces it meanwhile, one at a time. Calls of
    other threads pass through it, or, where the kernel is missing, get an output of one axis, which every known
    dispatcher declines as it declines a missing kernel. One race remains: a thread that read the kernel while the
    recorder was there, and calls it when None is back, gets AttributeError. The quantized tensors are ours: Transformer
    Engine may be missing too, and is never imported.
    """
    import torch

    query, key = _made_quantized(1, 1, 16, 576), _made_quantized(1, 1, 1, 576)
    indices = torch.zeros(1, 1, 64, dtype=torch.int32, device="cpu")
    thread = threading.get_ident()
    got: list[tuple[Any, ...]] = []

    class Recorder:
        @staticmethod
        def apply(*args: Any) -> Any:
            if threading.get_ident() != thread:
                return (torch.empty(0, device="cpu"), None) if upstream is None else upstream.apply(*args)
            got.append(args[:2])
            output = torch.zeros(*args[0].shape[:-1], 512, dtype=torch.bfloat16, device="cpu")
            return output, output[..., 0].float()

    with _SWAPPING:
        upstream = getattr(module, feature.KERNEL)
        setattr(module, feature.KERNEL, Recorder)
        try:
            output = getattr(module, symbol)(query, key, indices, 1.0, 512)
        finally:
            setattr(module, feature.KERNEL, upstream)
    if len(got) != 1 or output is None:
        return Observation(broken=False, seen="the dispatcher declines quantized tensors")
    names = " and ".join(feature.TENSORS)
    if any(type(tensor) is not torch.Tensor for tensor in got[0]):
        return Observation(broken=True, seen=f"the kernel gets a quantized {names}, whose pointer is 0")
    opened = [query.opened, key.opened]
    if opened != [1, 1]:
        return Observation(broken=True, seen=f"{names} reach the kernel dequantized by whatever operation came first")
    if not all(bool((tensor == 1).all()) for tensor in got[0]):
        return Observation(broken=True, seen=f"{names} reach the kernel with other values than they stand for")
    return Observation(broken=False, seen=f"{names} are dequantized once each, on purpose")


def _made_quantized(*shape: int) -> Any:
    """Return ones of bf16 that behave like a Float8Tensor on the CPU, and count in `opened` who dequantizes them.

    Slices and `contiguous` stay quantized, the pointer is 0, and any other operation dequantizes, which does not count.
    """
    import torch

    aten = torch.ops.aten
    views = {aten.slice.Tensor, aten.select.int, aten.clone.default, aten.detach.default, aten.view.default}

    class QuantizedStandIn(torch.Tensor):  # type: ignore[misc] # torch is not seen by the type checker
        payload: Any
        opened: int

        @staticmethod
        def __new__(cls: Any, payload: Any) -> Any:
            make = torch.Tensor._make_wrapper_subclass  # noqa: SLF001 - how torch documents wrapper subclasses
            made = make(cls, payload.shape, dtype=torch.bfloat16, device="cpu")
            made.payload, made.opened = payload, 0
            return made

        def contiguous(self, *_: Any, **__: Any) -> Any:
            return self

        def dequantize(self, **_: Any) -> Any:
            self.opened += 1
            return self.payload.to(torch.bfloat16)

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            def plain(value: Any) -> Any:
                return value.payload.to(torch.bfloat16) if isinstance(value, cls) else value

            if function in views:
                return cls(function(args[0].payload, *args[1:], **(kwargs or {})))
            return function(*map(plain, args), **(kwargs or {}))

        __torch_function__ = torch._C._disabled_torch_function_impl  # noqa: SLF001 - as Transformer Engine has it

    return QuantizedStandIn(torch.ones(shape, dtype=torch.uint8, device="cpu"))


def _part(target: Target, probe: Callable[[SourceTree], Finding], shapes: tuple[str, ...]) -> Overlay:
    def ask(module: ModuleType) -> Observation:
        return observe(module, target.symbol)

    return Overlay(
        id=ID,
        pack=3,
        title="hand a quantized query or key to an FP8-aware SparseMLA, or dequantize it once and say so",
        target=target,
        probe=probe,
        replacements={shape: (Replacement(symbol=target.symbol, make=_unwrapping),) for shape in shapes},
        unsupported={},
        witness=ask,
        self_test=ask,
        opt_in=False,
        symptoms=(
            "illegal memory access or null pointer in SparseMLA under FP8",
            "FP8 sparse attention is no faster than bf16",
        ),
        concerns="dsa",
        breaks=(
            "a query or key that a projection left quantized reaches SparseMLA as a null pointer (spring 2026), or is "
            "dequantized without a word (0.19)"
        ),
        brief="quantized tensors that reach SparseMLA",
        until="the dispatcher unwraps them itself",
        retire_when="the dispatcher asks for QuantizedTensor itself, or the TileLang backend is gone",
        threads=(
            Thread(repository="NVIDIA/Megatron-LM", number=5049, state="merged 2026-07-24, brought the silent form"),
            Thread(repository="NVIDIA/Megatron-LM", number=6279, state="open, the same form for dev"),
            Thread(repository="NVIDIA/TransformerEngine", number=2721, state="merged 2026-03-15, says data_ptr is 0"),
            Thread(repository="NVIDIA/TransformerEngine", number=2974, state="merged 2026-05-22, empty storage"),
        ),
        last_validated=(
            "2026-11-21, H200, torch 2.11.0+cu130, megatron-core 0.19.2 with transformer-engine 2.20.2 and tilelang 0.1.8; "
            "x86-64 without GPU, transformer-engine 2.8 to 2.20.2"
        ),
    )


PARTS = (
    _part(feature.TARGET, feature.probe, (feature.GUARD_FOOLED, feature.PER_BATCH)),
    _part(feature.SPRING_TARGET, feature.probe_spring, (feature.PER_BATCH, feature.GUARD_FOOLED)),
)
