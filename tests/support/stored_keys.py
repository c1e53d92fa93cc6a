"""Tensors of Transformer Engine of numbers that need rounding, in the layouts in which a key may be stored."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

BF16 = torch.bfloat16


def _bits(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    numbers = torch.randn(shape, generator=generator, device="cpu").to(torch.float8_e4m3fn)
    return numbers.view(torch.uint8).to(torch.get_default_device())


def _scales(*shape: int) -> torch.Tensor:
    """Return scales that are no powers of two, so that products are rounded."""
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(7), device="cpu") + 0.3
    return numbers.to(torch.get_default_device())


def _made(cls: Any, shape: tuple[int, ...], common: dict[str, Any], optional: dict[str, Any]) -> Any:
    """Call the constructor of a release with those optional arguments that it takes, on the default device."""
    takes = {name for base in cls.__mro__ for name in inspect.signature(base.__new__).parameters}
    given = {name: value for name, value in {"device": torch.get_default_device(), **optional}.items() if name in takes}
    return cls(shape=shape, dtype=BF16, **common, **given)


def of_one_scale(engine: SimpleNamespace, *shape: int, requires_grad: bool = False) -> Any:
    common = {"data": _bits(*shape), "fp8_scale_inv": _scales(1), "fp8_dtype": engine.tex.DType.kFloat8E4M3}
    return _made(engine.Float8Tensor, shape, common | {"requires_grad": requires_grad}, {})


def of_blocks(engine: SimpleNamespace, *shape: int, squares: bool = False, requires_grad: bool = False) -> Any:
    """Return a tensor of a scale for 128 channels of a row, or of 128 rows, with the padding of 4 that products take."""
    rows, blocks = torch.Size(shape[:-1]).numel(), -(-shape[-1] // 128)
    outer, inner = (-(-rows // 128), blocks) if squares else (blocks, rows)
    common = {
        "rowwise_data": _bits(*shape),
        "rowwise_scale_inv": _scales(outer, -(-inner // 4) * 4),
        "columnwise_data": None,
        "columnwise_scale_inv": None,
        "quantizer": None,
        "fp8_dtype": engine.tex.DType.kFloat8E4M3,
        "is_2D_scaled": squares,
        "requires_grad": requires_grad,
    }
    formats = getattr(engine.tex, "Float8BlockScaleTensorFormat", None)  # up to 2.10
    return _made(engine.Float8BlockwiseQTensor, shape, common, {"data_format": formats and formats.GEMM_READY})


def of_squares(engine: SimpleNamespace, *shape: int, requires_grad: bool = False) -> Any:
    return of_blocks(engine, *shape, squares=True, requires_grad=requires_grad)


LAYOUTS: dict[str, Callable[..., Any]] = {
    "one scale": of_one_scale,
    "blocks of a row": of_blocks,
    "blocks of 128 rows": of_squares,
}
