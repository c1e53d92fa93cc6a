"""Stand-in for dsa_masking of main in June 2026: same names, signatures and behaviour, none of its code."""

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa_layout


def scatter_topk_into_index_mask(index_mask, topk_indices, *, seq_chunk_size=256):
    """Write 0.0 where an index points; negative indices point nowhere."""
    assert topk_indices.ndim == 3, "three axes"
    batch, queries, _ = index_mask.shape
    assert (batch, queries) == topk_indices.shape[:2], "one row of indices for each query"
    step = max(1, int(seq_chunk_size))
    home = index_mask.device
    for first in range(0, queries, step):
        end = min(queries, first + step)
        picked = topk_indices[:, first:end]
        if picked.device != home or picked.dtype != torch.int64:
            picked = picked.to(device=home, dtype=torch.int64)
        if (picked < 0).any():
            real = picked >= 0
            if torch.any(real):
                batches, offsets, slots = torch.where(real)
                keys = picked[batches, offsets, slots]
                rows = first + offsets
                index_mask[batches, rows, keys] = 0.0
        else:
            index_mask[:, first:end].scatter_(-1, picked, 0.0)


def build_causal_mask_from_positions(query_pos, key_pos):
    """Return 0 where a key is not after its query, else -inf."""
    late = key_pos[None, :] > query_pos[:, None]
    return torch.zeros(late.shape, dtype=torch.float32, device=late.device).masked_fill(late, float("-inf"))


def build_dsattention_forward_mask(
    *,
    sq,
    skv,
    b,
    device,
    cp_size,
    cp_rank,
    cp_comm_type,
    cp_group,
    attn_mask_type,
    attention_mask,
    position_ids,
    packed_seq_params,
    packed_query_positions=None,
):
    """Return an additive mask, or first key, end and positions of keys for packed sequences."""
    if attn_mask_type is None:
        assert attention_mask.shape == (b, 1, sq, skv)
        hidden = attention_mask[:, 0]
        return torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, float("-inf")), None
    assert attn_mask_type == AttnMaskType.causal
    query_pos, key_pos = dsa_layout.get_cp_positions_from_layout(
        sq, skv, cp_size, cp_rank, cp_comm_type, device, cp_group
    )
    if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
        cu_seqlens = packed_seq_params.cu_seqlens_q.to(dtype=torch.int64)
        queries = query_pos if packed_query_positions is None else packed_query_positions
        starts = cu_seqlens[torch.searchsorted(cu_seqlens[1:], queries, right=True)]
        return None, (starts, queries + 1, key_pos)
    given = dsa_layout.extract_query_positions_from_position_ids(position_ids, sq, device) if cp_size > 1 else None
    return build_causal_mask_from_positions(query_pos if given is None else given, key_pos), None


def build_fused_indexer_varlen_bounds(*, sq, skv, device, mask, varlen_starts, varlen_ends, key_positions):
    """Return the first key and the end for each query, or None where the keys of a query are no one range."""
    everything = torch.arange(skv, dtype=torch.int64, device=device)
    if varlen_starts is not None:
        if mask is not None or varlen_ends is None:
            raise ValueError("a mask, or both starts and ends")
        positions = everything if key_positions is None else key_positions
        if not torch.equal(everything, positions):
            return None
        return varlen_starts.to(torch.int32), varlen_ends.to(torch.int32)
    if mask is None:
        ends = torch.arange(1, sq + 1, dtype=torch.int32, device=device).clamp(max=skv)
        return torch.zeros_like(ends), ends
    if mask.ndim == 3:
        for other in mask[1:]:
            if not torch.equal(mask[0], other):
                return None
        mask = mask[0]
    seen = mask.isfinite()
    ends = seen.sum(dim=-1, dtype=torch.int32)
    if not torch.equal(seen, everything < ends[:, None]):
        return None
    return torch.zeros_like(ends), ends
