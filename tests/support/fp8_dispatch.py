"""Call a dispatcher of the fused SparseMLA kernel without the kernel, and return the arguments of the kernel; also a program.

    python fp8_dispatch.py MODULE SYMBOL

calls the dispatcher of one tree, which must be first on the path, with and without the seam, and prints the arguments that
the kernel got as JSON. Trees share the name of the real package, so each gets a process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from megacpp_overlays.loader import seams
from megacpp_overlays.model import Overlay
from megacpp_overlays.overlays import fp8_quantized_unwrap as overlay
from megacpp_overlays.source.trees import InstalledTree

BF16 = torch.bfloat16
ROWS, BATCH, HEADS, TOPK = 3, 2, 16, 64


class AsFloat8(torch.Tensor):
    """Stand-in for a Float8Tensor: says bf16, no storage, slices stay, the rest dequantizes silently."""

    payload: torch.Tensor
    opened: int
    VIEWS = ("select.int", "slice.Tensor", "view.default", "detach.default", "clone.default")

    @staticmethod
    def __new__(cls, payload: torch.Tensor, *, requires_grad: bool = False) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls, payload.shape, dtype=BF16, device=payload.device, requires_grad=requires_grad
        )
        made.payload, made.opened = payload, 0
        return made

    def contiguous(self, *_: Any, **__: Any) -> Any:
        return self

    def dequantize(self, **_: Any) -> torch.Tensor:
        """Count, and forget the gradient, as HybridQuantizedTensor does."""
        self.opened += 1
        return self.payload.to(BF16)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function).removeprefix("aten.") in cls.VIEWS:
            return cls(function(args[0].payload, *args[1:], **(kwargs or {})))
        plain = torch.utils._pytree.tree_map(
            lambda each: each.payload.to(BF16) if isinstance(each, cls) else each, args
        )
        return function(*plain, **(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl


def quantized(plain: torch.Tensor, *, requires_grad: bool = False) -> Any:
    return AsFloat8(plain.detach().to(torch.float8_e5m2), requires_grad=requires_grad)


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query [sq, b, heads, 576], key [sq, b, 1, 576], values that E5M2 holds exactly, and indices [b, sq, 64]."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randint(-2, 3, (ROWS, BATCH, HEADS, 576), generator=generator).to(BF16)
    key = torch.randint(-2, 3, (ROWS, BATCH, 1, 576), generator=generator).to(BF16)
    return query, key, torch.zeros(BATCH, ROWS, TOPK, dtype=torch.int32)


class Kernel:
    """Stand-in for TileLang's autograd function, for both layouts; keeps its arguments."""

    def __init__(self) -> None:
        self.got: list[tuple[Any, Any]] = []

    def apply(self, query: Any, key: Any, indices: Any, scale: float) -> Any:
        self.got.append((query, key))
        output = (query * key * scale)[..., :512]
        return output, output[..., 0].float()


class TraceableKernel(torch.autograd.Function):
    """Stand-in for TileLang's kernel that torch.compile can trace."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, indices: Any, scale: float) -> Any:
        ctx.save_for_backward(query, key)
        ctx.scale = scale
        return (query * key * scale)[..., :512].clone(), query[..., 0].float()

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        query, key = ctx.saved_tensors
        wide = torch.nn.functional.pad(gradient, (0, 64)) * ctx.scale
        return wide * key, (wide * query).sum(dim=2, keepdim=True), None, None


@contextlib.contextmanager
def kernel_in(module: ModuleType, kernel: Any) -> Iterator[Any]:
    before, module.SparseMLA = module.SparseMLA, kernel  # type: ignore[attr-defined]
    try:
        yield kernel
    finally:
        module.SparseMLA = before  # type: ignore[attr-defined]


@contextlib.contextmanager
def seam_in(module: ModuleType, part: Overlay) -> Iterator[Any]:
    """Put in the seam of a part, for the shape that its probe finds in the loaded tree."""
    shape = part.probe(InstalledTree()).shape
    assert shape is not None
    (replacement,) = part.replacements[shape]
    make = replacement.make
    placed = seams.replace(module, replacement.symbol, lambda original: make(original, module), overlay_id=part.id)
    try:
        yield placed
    finally:
        placed.undo()


def part_of(module_name: str) -> Overlay:
    (part,) = (each for each in overlay.PARTS if each.target.module == module_name)
    return part


def kinds(kernel: Kernel) -> list[str]:
    return sorted({f"{type(tensor).__name__} at {bool(tensor.data_ptr())}" for pair in kernel.got for tensor in pair})


def report(module_name: str) -> dict[str, Any]:
    """Return the arguments that the kernel of a tree gets without and with the seam, and whether anything else changed."""
    module, part = importlib.import_module(module_name), part_of(module_name)
    dispatch = part.target.symbol
    query, key, indices = inputs()

    def call(query: Any, key: Any) -> tuple[Any, Kernel]:
        with kernel_in(module, Kernel()) as kernel:
            return getattr(module, dispatch)(query, key, indices, 0.5, 512), kernel

    plain = query.clone().requires_grad_(), key.clone().requires_grad_()
    expected, direct = call(*plain)
    expected.sum().backward()
    _, before = call(quantized(query), quantized(key))
    witness = part.self_test(module)
    with seam_in(module, part):
        pair = quantized(query, requires_grad=True), quantized(key, requires_grad=True)
        output, after = call(*pair)
        output.sum().backward()
        tested = part.self_test(module)
        declined = getattr(module, dispatch)(quantized(query), quantized(key), indices, 0.5, 512)
    return {
        "plain": kinds(direct),
        "before": kinds(before),
        "after": kinds(after),
        "opened": [tensor.opened for tensor in pair],
        "equal": torch.equal(output, expected),
        "gradients": [torch.equal(one.grad, other.grad) for one, other in zip(pair, plain, strict=True)],
        "witness": [witness.broken, tested.broken],
        "declined without a kernel": declined is None,
    }


if __name__ == "__main__":
    json.dump(report(sys.argv[1]), sys.stdout)
