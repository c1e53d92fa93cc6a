"""Attention over chosen keys in packed rows of documents, with the cumulative lengths that other kernels take."""

from __future__ import annotations

import torch

from megacpp_overlays.kernels.sparse_attention import function
from megacpp_overlays.kernels.sparse_attention.quantized_keys import QuantizedKeys


def attend(
    query: torch.Tensor,
    key: torch.Tensor | QuantizedKeys,
    indices: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    value_channels: int,
    sink: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of `function.attend` for packed rows: each query chooses among the keys of its own document.

    The host reads nothing from the device, so lengths may change between replays of a CUDA graph. Queries behind the last
    document, such as padding, choose nothing.

    Args:
        query: (queries, heads, dim), the documents one behind another.
        key: (keys, 1, dim), likewise. Or `QuantizedKeys` of these sizes, without the axis of the batch in scales, too: (keys,)
            or (keys, ceil(dim / 128)).
        indices: (queries, slots), int32 or int64, counted from the first key of the query's document; no choice where it is
            below 0, or no key of that document.
        cu_seqlens_q: (documents + 1,), int32 or int64: where the queries of each document begin, and where the last one ends.
        cu_seqlens_k: (documents + 1,), the same of keys.
        scale: see `function.attend`.
        value_channels: see there.
        sink: see there.
        bias: (queries, slots), see there.

    Returns:
        (queries, heads, value_channels) in the dtype of query, and (queries, heads), float32.

    Raises:
        TypeError: see `function.attend`.
        ValueError: shapes, dtypes or devices do not belong together.
    """
    keys = key.data if isinstance(key, QuantizedKeys) else key
    if query.ndim != 3 or keys.ndim != 3 or indices.ndim != 2:
        raise ValueError(
            "packed query, key and indices must be (queries, heads, dim), (keys, 1, dim) and (queries, slots), not "
            f"{tuple(query.shape)}, {tuple(keys.shape)} and {tuple(indices.shape)}"
        )
    in_row = choices_in_row(indices, cu_seqlens_q, cu_seqlens_k)
    rows = None if bias is None else bias.unsqueeze(0)
    of_a_batch = key.of_a_batch() if isinstance(key, QuantizedKeys) else key.unsqueeze(1)
    output, lse = function.attend(
        query.unsqueeze(1), of_a_batch, in_row.unsqueeze(0), scale, value_channels, sink, rows
    )
    return output.squeeze(1), lse.squeeze(1)


def choices_in_row(indices: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> torch.Tensor:
    """Return choices that count from the beginning of the row, for some that count from that of a document.

    Args:
        indices: (queries, slots), see `attend`.
        cu_seqlens_q: (documents + 1,), see there.
        cu_seqlens_k: (documents + 1,), see there.

    Returns:
        (queries, slots) in the dtype of indices, -1 where there is no choice.

    Raises:
        ValueError: lengths are not of the same documents, no whole numbers, or on another device.
    """
    lengths = (cu_seqlens_q, cu_seqlens_k)
    if any(each.ndim != 1 or each.dtype not in {torch.int32, torch.int64} for each in lengths):
        described = " and ".join(f"{each.dtype} of {tuple(each.shape)}" for each in lengths)
        raise ValueError(f"cu_seqlens must be int32 or int64 of (documents + 1,), not {described}")
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.numel() < 2:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must be of the same documents, at least one, not of "
            f"{cu_seqlens_q.numel() - 1} and {cu_seqlens_k.numel() - 1}"
        )
    if len(devices := {str(each.device) for each in (indices, *lengths)}) > 1:
        raise ValueError(f"indices and cu_seqlens must be on one device, not on {' and '.join(sorted(devices))}")
    places = torch.arange(indices.size(0), dtype=cu_seqlens_q.dtype, device=indices.device)
    document = torch.searchsorted(cu_seqlens_q, places, right=True) - 1
    known = (document >= 0) & (document < cu_seqlens_k.numel() - 1)
    document = document.clamp(0, cu_seqlens_k.numel() - 2)
    first = cu_seqlens_k[document].to(indices.dtype).unsqueeze(1)
    count = (cu_seqlens_k[document + 1] - cu_seqlens_k[document]).to(indices.dtype).unsqueeze(1)
    is_choice = known.unsqueeze(1) & (indices >= 0) & (indices < count)
    return (indices + first).masked_fill(~is_choice, -1)
