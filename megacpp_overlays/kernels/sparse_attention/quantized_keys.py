"""Keys that are stored as FP8 numbers with scales: checks of their parts, and dequantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

BLOCK = 128
"""Channels that share a scale where a key has several."""


@dataclass(frozen=True, slots=True)
class QuantizedKeys:
    """Keys as float8_e4m3fn numbers, each to be multiplied with a float32 scale."""

    data: torch.Tensor
    """(keys, batch, 1, dim), float8_e4m3fn, or uint8 that holds its bits."""
    scale: torch.Tensor
    """float32, the factors of the numbers: () or (1,) for all keys, (keys, batch) for a key each, or (keys, batch,
    ceil(dim / 128)) for blocks of 128 channels."""
    gradient_for: torch.Tensor | None = None
    """(keys, batch, 1, dim), floating: takes the gradient with regard to the dequantized keys, as if it had been used in place
    of them (straight through). Its numbers are never read, so it may be a view of one number."""

    def of_a_batch(self) -> QuantizedKeys:
        """Return packed keys, (keys, 1, dim) with scales for all, of (keys,) or (keys, blocks), as those of a batch of one."""
        is_for_all = self.scale.ndim == 0 or (self.scale.shape == (1,) and self.data.size(0) != 1)
        return QuantizedKeys(
            self.data.unsqueeze(1),
            self.scale if is_for_all else self.scale.unsqueeze(1),
            None if self.gradient_for is None else self.gradient_for.unsqueeze(1),
        )

    def check(self, dtype: torch.dtype) -> None:
        """Raise unless data, scale and `gradient_for` belong together, for queries of a dtype.

        Raises:
            TypeError: the dtype of one of them is not as above.
            ValueError: a shape or a device is not.
        """
        if self.data.dtype not in {torch.float8_e4m3fn, torch.uint8}:
            raise TypeError(
                f"data of quantized keys must be float8_e4m3fn, or uint8 of its bits, not {self.data.dtype}; "
                "give keys of another dtype as they are, or dequantize them"
            )
        if self.scale.dtype != torch.float32:
            raise TypeError(
                f"scale of quantized keys must be float32, not {self.scale.dtype}; convert it with .float()"
            )
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise TypeError(f"queries of quantized keys must have 16 bits or more, not {dtype}; dequantize them")
        if self.data.ndim != 4:
            raise ValueError(f"data of quantized keys must be (keys, batch, 1, dim), not {tuple(self.data.shape)}")
        keys, batch, _, dim = self.data.shape
        shapes = [(), (1,), (keys, batch), (keys, batch, -(-dim // BLOCK))]
        if tuple(self.scale.shape) not in shapes:
            raise ValueError(
                f"scale of quantized keys of {tuple(self.data.shape)} must be () for all, {shapes[2]} for a key each or "
                f"{shapes[3]} for blocks of {BLOCK} channels, not {tuple(self.scale.shape)}; a scale for each row of (keys * "
                "batch) is brought to it with .view"
            )
        of = self.gradient_for
        if of is not None and not of.is_floating_point():
            raise TypeError(
                f"gradient_for of quantized keys must be floating, not {of.dtype}; leave it out for no gradient"
            )
        if of is not None and of.shape != self.data.shape:
            raise ValueError(
                f"gradient_for of quantized keys must be of the shape of data, {tuple(self.data.shape)}, not {tuple(of.shape)}"
            )

    def scales(self) -> torch.Tensor:
        """Return a view of the scales as (keys, batch, blocks): one block where channels share them."""
        keys, batch = self.data.shape[:2]
        if self.scale.ndim < 2:
            return self.scale.reshape(1, 1, 1).expand(keys, batch, 1)
        return self.scale if self.scale.ndim == 3 else self.scale.unsqueeze(2)

    def opened(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers that the keys stand for, rounded once to a dtype; differentiable in `gradient_for`."""
        numbers = opened(self.data, self.scales().unsqueeze(2), dtype)
        return numbers if self.gradient_for is None else _StraightThrough.apply(numbers, self.gradient_for)


def as_float8(data: torch.Tensor) -> torch.Tensor:
    """Return FP8 numbers for their bits."""
    return data.view(torch.float8_e4m3fn)


def opened(data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that some keys stand for.

    Args:
        data: (..., dim), FP8 numbers or their bits.
        scales: (..., blocks), float32: one, or one for each block of channels.
        dtype: of the result, at least 16 bits.

    Returns:
        (..., dim): products in float32, or in float64 if that is asked for, rounded to the dtype.
    """
    wide = torch.promote_types(dtype, torch.float32)
    result = torch.empty(data.shape, dtype=dtype, device=data.device)
    for block, start in enumerate(range(0, data.size(-1), BLOCK)):  # in blocks, so that wide copies stay small
        some, which = slice(start, start + BLOCK), block if scales.size(-1) > 1 else 0
        result[..., some] = as_float8(data[..., some]).to(wide) * scales[..., which, None].to(wide)
    return result


class _StraightThrough(torch.autograd.Function):  # type: ignore[misc] # torch is not seen by the type checker
    """Hand the gradient of opened keys to another tensor."""

    @staticmethod
    def forward(_ctx: Any, numbers: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return numbers.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient
