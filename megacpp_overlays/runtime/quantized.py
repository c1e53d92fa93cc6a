"""Quantized wrapper tensors: recognition, and conversion to plain tensors.

A tensor of Transformer Engine's `QuantizedTensor` family answers like a bf16 tensor (dtype, device, `is_contiguous`),
but its own storage is empty: `data_ptr()` is 0 and the payload is in attributes whose names differ by recipe and
release. It is recognised by the name of its class, without an import. Wrappers of other libraries are recognised by
an empty storage together with a `dequantize` of their own. A wrapper without a `dequantize` is not converted:
torch's own (DTensor, AsyncCollectiveTensor, FakeTensor) and many others become plain in the first operation, and
any other is left to the code that receives it.

Standard library only at import.
"""

from __future__ import annotations

import functools
from typing import Any

_ENGINE, _BASE = "transformer_engine", "QuantizedTensor"

_RECIPES = {
    "Float8Tensor": "per-tensor FP8",
    "MXFP8Tensor": "MXFP8",
    "Float8BlockwiseQTensor": "blockwise FP8",
    "NVFP4Tensor": "NVFP4",
    "HybridQuantizedTensor": "hybrid",
    "IdentityTensor": "identity, not quantized",
}
_SCALINGS = {"Float8Quantizer": "delayed scaling", "Float8CurrentScalingQuantizer": "current scaling"}
_HALVES = ("_rowwise_storage", "_columnwise_storage")
"""Attributes of a hybrid tensor that hold storages of other recipes."""


def is_quantized(value: object) -> bool:
    """Return whether a value is a quantized wrapper tensor that can be dequantized.

    Costs a walk over the bases of its class; for `torch.Tensor` itself, check `type(value)` first.
    """
    kind = type(value)
    return _is_of_transformer_engine(kind) or (_dequantizes_itself(kind) and _has_no_storage(value))


def _is_of_transformer_engine(kind: type) -> bool:
    # The module of the base class moved in 2.10; its name and its distribution did not.
    return any(base.__name__ == _BASE and _top_level(base) == _ENGINE for base in kind.__mro__)


def _dequantizes_itself(kind: type) -> bool:
    """Return whether a class has a `dequantize` that is not torch's, which every tensor inherits."""
    for base in kind.__mro__:
        if _top_level(base) == "torch":
            return False
        if "dequantize" in vars(base):
            return True
    return False


def _top_level(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _has_no_storage(value: Any) -> bool:
    try:
        return bool(value.data_ptr() == 0 and value.numel() > 0)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # it has none to point to
        return True


def dequantized(tensor: Any) -> Any:
    """Dequantize a tensor; gradients of the result reach the quantized tensor.

    The class's own `dequantize` is called once. In Transformer Engine it carries gradients by itself for Float8Tensor,
    MXFP8Tensor and NVFP4Tensor (2.8 to 2.20.2) and for Float8BlockwiseQTensor since 2.18; it does not for
    HybridQuantizedTensor and IdentityTensor, nor for Float8BlockwiseQTensor before. There the gradient is passed
    straight through, as the others do.

    Args:
        tensor: any for which `is_quantized` holds, of any shape.

    Returns:
        A tensor of the same shape, dtype and device with a storage of its own. It may share that storage with the
        quantized tensor where that holds high-precision data (IdentityTensor): do not write to it.

    Raises:
        TypeError: `dequantize` returned something else.
    """
    import torch

    by_dtype = {"dtype": tensor.dtype} if _is_of_transformer_engine(type(tensor)) else {}
    plain = tensor.dequantize(**by_dtype)
    if not isinstance(plain, torch.Tensor) or is_quantized(plain) or plain.shape != tensor.shape:
        raise TypeError(f"{_name(tensor)}.dequantize() returned {_name(plain)}, which is no plain tensor of its shape")
    if torch.is_grad_enabled() and tensor.requires_grad and not plain.requires_grad:
        plain = _straight_through().apply(tensor, plain)
    return plain if plain.dtype == tensor.dtype else plain.to(tensor.dtype)


@functools.cache
def _straight_through() -> Any:
    """Return the autograd function `(quantized, plain) -> plain` whose gradient goes to the quantized tensor."""
    import torch

    class StraightThrough(torch.autograd.Function):  # type: ignore[misc] # torch is not seen by the type checker
        """Give a dequantized tensor the history of the quantized one."""

        @staticmethod
        def forward(ctx: Any, quantized: Any, plain: Any) -> Any:
            # A new tensor: autograd changes the returned tensor, and `plain` may be an attribute of the quantized tensor.
            return plain.detach()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient, None

    return StraightThrough


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def recipe(tensor: Any) -> str:
    """Return the name of a tensor's quantization recipe; for an unknown class, the name of the class."""
    # Storages carry the name of their tensor class with Storage after it; until 2.8 with Base.
    names = [base.__name__.removesuffix("Storage").removesuffix("Base") for base in type(tensor).__mro__]
    known = next((name for name in names if name in _RECIPES), None)
    if known is None:
        return type(tensor).__name__
    halves = [getattr(tensor, name, None) for name in _HALVES]
    if any(half is not None for half in halves):
        row, column = ("nothing" if half is None else recipe(half) for half in halves)
        return f"{_RECIPES[known]} of {row} by rows and {column} by columns"
    scaling = _SCALINGS.get(type(getattr(tensor, "_quantizer", None)).__name__)
    return f"{_RECIPES[known]}, {scaling}" if scaling else _RECIPES[known]


def payload_bytes(tensor: Any) -> int:
    """Return the bytes of all buffers that a quantized tensor holds: data, its transpose, and scales."""
    import torch

    total, holders, seen = 0, [tensor], set()
    while holders:
        attributes = getattr(holders.pop(), "__dict__", {})
        for name, value in attributes.items():
            if value is None or id(value) in seen:
                continue
            seen.add(id(value))
            if name in _HALVES or is_quantized(value):
                holders.append(value)
            elif isinstance(value, torch.Tensor):
                total += value.numel() * value.element_size()
    return total
