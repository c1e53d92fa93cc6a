"""Check that tensors are those of Megatron's absorbed sparse attention: queries of many heads, one head of keys, chosen indices.

Standard library only at import.
"""

from __future__ import annotations

from typing import Any


def matches(query: Any, key: Any, indices: Any, scale: Any, value_channels: Any) -> bool:
    """Return whether shapes, dtypes and devices belong together, as `kernels.sparse_attention` asks for them.

    Args:
        query: (queries, batch, heads, dim), floating.
        key: (keys, batch, 1, dim), in the dtype of query.
        indices: (batch, queries, slots), of any integers, on any device.
        scale: a number.
        value_channels: from 1 to dim.
    """
    import torch

    if not all(isinstance(each, torch.Tensor) for each in (query, key, indices)) or not isinstance(scale, int | float):
        return False
    if (query.ndim, key.ndim, indices.ndim) != (4, 4, 3) or not 1 <= value_channels <= key.size(3):
        return False
    return bool(
        query.dtype == key.dtype
        and query.is_floating_point()
        and query.device == key.device
        and key.size(0) > 0
        and key.shape[1:] == (query.size(1), 1, query.size(3))
        and indices.shape[:2] == (query.size(1), query.size(0))
        and not indices.is_floating_point()
        and not indices.is_complex()
        and indices.dtype != torch.bool
    )


def to_take(indices: Any, device: Any) -> Any:
    """Return indices on a device, in one of the two dtypes that the kernel takes."""
    import torch

    indices = indices.to(device)
    return indices if indices.dtype in {torch.int32, torch.int64} else indices.long()
