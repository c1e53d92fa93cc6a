"""FP8 numbers and scales inside of a quantized tensor of Transformer Engine, found without dequantizing it.

Names, layouts and paddings are those of transformer-engine 2.8 to 2.20.2. A tensor with another layout is not
read: the result is None, and the caller uses the tensor's own `dequantize`.

Standard library only at import.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_ENGINE = "transformer_engine"
_E4M3 = "kFloat8E4M3"
_BLOCK = 128
"""Channels, and in two dimensions also rows, that share a scale where there are several."""
_PADDING = 4
"""Rows of scales are padded to a multiple of this."""


class Payload(NamedTuple):
    """Storage of a quantized tensor of shape (*rows, dim): its values are the numbers times the scales, in float32."""

    data: Any
    """(*rows, dim), uint8: the bits of float8_e4m3fn numbers. A view of the tensor's buffer."""
    scale: Any
    """float32: () for all, or (*rows, ceil(dim / 128)), any strides. A view, unless blocks have several rows."""


def held_by(tensor: Any) -> Payload | None:
    """Return the numbers and scales that `dequantize` of a tensor would read; None for an unknown class or layout.

    Args:
        tensor: any value. Known are Transformer Engine's classes with one scale for all numbers (Float8Tensor), and with one
            for each 128 channels of a row, or of 128 rows (Float8BlockwiseQTensor).
    """
    import torch

    kind = type(tensor)
    if kind.__module__.partition(".")[0] != _ENGINE or torch.version.hip:  # where E4M3 may have other bits
        return None
    if getattr(getattr(tensor, "_fp8_dtype", None), "name", None) != _E4M3:
        return None
    if kind.__name__ == "Float8Tensor":
        return _of_one_scale(tensor)
    if kind.__name__ == "Float8BlockwiseQTensor":
        return _of_blocks(tensor)
    return None


def _of_one_scale(tensor: Any) -> Payload | None:
    data: Any = getattr(tensor, "_data", None)
    scale: Any = getattr(tensor, "_scale_inv", None)
    if not _belong_together(tensor, data, scale) or scale.ndim > 1 or scale.numel() != 1:
        return None
    return Payload(data, scale.reshape(()))


def _of_blocks(tensor: Any) -> Payload | None:
    data: Any = getattr(tensor, "_rowwise_data", None)
    scale: Any = getattr(tensor, "_rowwise_scale_inv", None)
    # Up to 2.10 scales could be stored in another order.
    if not _belong_together(tensor, data, scale) or not _is_gemm_ready(tensor) or scale.ndim != 2:
        return None
    *leading, dim = data.shape
    rows, blocks = data.numel() // dim, -(-dim // _BLOCK)
    is_of_squares = getattr(tensor, "_is_2D_scaled", None)
    if is_of_squares is False and _is_padded(scale.shape, blocks, rows):
        by_row = scale[:, :rows].t()
    elif is_of_squares is True and _is_padded(scale.shape, -(-rows // _BLOCK), blocks):
        by_row = scale[:, None, :blocks].expand(-1, _BLOCK, -1).reshape(-1, blocks)[:rows]
    else:
        return None
    return Payload(data, by_row.unflatten(0, leading))


def _belong_together(tensor: Any, data: Any, scale: Any) -> bool:
    import torch

    return (
        type(data) is torch.Tensor
        and type(scale) is torch.Tensor
        and data.dtype == torch.uint8
        and scale.dtype == torch.float32
        and data.shape == tensor.shape
        and data.ndim > 1
        and data.numel() > 0
        and data.device == scale.device == tensor.device
    )


def _is_gemm_ready(tensor: Any) -> bool:
    """Return whether scales are in the order that GEMMs read, the only one since 2.11."""
    return not hasattr(tensor, "_data_format") or getattr(tensor._data_format, "name", None) == "GEMM_READY"  # noqa: SLF001


def _is_padded(shape: Any, outer: int, inner: int) -> bool:
    """Return whether a shape is (outer, inner), the inner size as it is or rounded up."""
    return tuple(shape) in {(outer, inner), (outer, -(-inner // _PADDING) * _PADDING)}
