"""Stand-in for `ops/tilelang_dsa.py` of an early Megatron-LM#5049, before its bf16 guard: same names, signatures and behaviour, none of its code.

Only the dispatcher of the fused SparseMLA kernel and what calls it.
"""

from __future__ import annotations

import torch

try:
    from megatron.core.transformer.experimental_attention_variant.ops.sparse_mla import SparseMLA
except (ImportError, OSError):
    SparseMLA = None


def fused_sparse_mla_absorbed(
    query: torch.Tensor,  # [sq, b, heads, 576]
    key: torch.Tensor,  # [skv, b, 1, 576]
    topk_indices: torch.Tensor,  # [b, sq, topk]
    softmax_scale: float,
    v_channels: int,
) -> torch.Tensor | None:
    """Return the output [sq, b, heads, v_channels], or None where the kernel does not fit."""
    if SparseMLA is None:
        return None
    if (query.ndim, key.ndim, topk_indices.ndim) != (4, 4, 3) or key.size(2) != 1:
        return None
    rows, batch = query.size(0), query.size(1)
    if key.size(1) != batch or topk_indices.size(0) != batch or topk_indices.size(1) != rows:
        return None
    if (query.size(-1), key.size(-1), v_channels) != (576, 576, 512) or topk_indices.size(-1) % 64:
        return None
    collected = None
    for element in range(batch):
        q = query[:, element].contiguous()
        kv = key[:, element].contiguous()
        chosen = topk_indices[element].unsqueeze(1).to(torch.int32).contiguous()
        one, _ = SparseMLA.apply(q, kv, chosen, softmax_scale)
        if one.ndim != 3 or one.size(-1) != v_channels:
            return None
        if collected is None:
            shape = (one.size(0), batch, one.size(1), one.size(2))
            collected = torch.empty(shape, dtype=one.dtype, device=one.device)
        collected[:, element].copy_(one)
    return None if collected is None else collected.contiguous()


def run_fused_absorbed_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    topk_indices: torch.Tensor,
    softmax_scale: float,
    v_channels: int,
) -> torch.Tensor | None:
    """Return what the dispatcher returns; the hook by which the backend is reached."""
    return fused_sparse_mla_absorbed(query, key, topk_indices, softmax_scale, v_channels)
