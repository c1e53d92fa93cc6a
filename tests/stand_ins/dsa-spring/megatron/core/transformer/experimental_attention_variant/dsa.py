"""Stand-in for dsa.py of spring 2026: same names, signatures and behaviour, none of its code."""

import torch
from megatron.core.transformer.enums import AttnMaskType

lighting_indexer = None
"""The fused indexer, where its kernels can be imported."""


def _get_cp_positions_from_layout(sq, skv, cp_size, cp_rank, cp_comm_type, device, cp_group=None):
    """Return the positions of this rank's queries, a chunk from the front and its mirror, and of all keys."""
    keys = torch.arange(skv, device=device, dtype=torch.int64)
    if cp_size == 1:
        return torch.arange(sq, device=device, dtype=torch.int64), keys
    if cp_comm_type != "allgather":
        raise NotImplementedError(cp_comm_type)
    chunks = torch.arange(skv, device=device, dtype=torch.int64).view(2 * cp_size, -1)
    return torch.cat((chunks[cp_rank], chunks[-1 - cp_rank])), keys


def _extract_query_positions_from_position_ids(position_ids, sq, device):
    """Return the positions of one row if there are as many as queries."""
    if position_ids is None:
        return None
    if position_ids.ndim not in (1, 2):
        raise ValueError(f"{position_ids.ndim} axes")
    row = position_ids
    if position_ids.ndim == 2:
        if position_ids.size(0) > 1:
            assert torch.equal(position_ids[0], position_ids[-1]), "rows differ"
        row = position_ids[0]
    return row.to(dtype=torch.int64, device=device) if row.numel() == sq else None


def _scatter_topk_into_index_mask(index_mask, topk_indices, *, seq_chunk_size=256):
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


def _build_causal_mask_from_positions(query_pos, key_pos):
    """Return 0 where a key is not after its query, else -inf."""
    late = key_pos[None, :] > query_pos[:, None]
    return torch.zeros(late.shape, dtype=torch.float32, device=late.device).masked_fill(late, float("-inf"))


def _build_dsattention_forward_mask(
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
):
    """Return an additive mask, or first key, end and positions of keys for packed sequences."""
    if attn_mask_type is None:
        assert attention_mask.shape == (b, 1, sq, skv)
        hidden = attention_mask[:, 0]
        return torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, float("-inf")), None
    assert attn_mask_type == AttnMaskType.causal
    query_pos, key_pos = _get_cp_positions_from_layout(sq, skv, cp_size, cp_rank, cp_comm_type, device, cp_group)
    if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
        cu_seqlens = packed_seq_params.cu_seqlens_q.to(dtype=torch.int64)
        starts = cu_seqlens[torch.searchsorted(cu_seqlens[1:], query_pos, right=True)]
        return None, (starts, query_pos + 1, key_pos)
    given = _extract_query_positions_from_position_ids(position_ids, sq, device) if cp_size > 1 else None
    return _build_causal_mask_from_positions(query_pos if given is None else given, key_pos), None


def _build_fused_indexer_varlen_bounds(*, sq, skv, device, mask, varlen_starts, varlen_ends, key_positions):
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


def _fused_qk_topk_lighting_with_streaming_sparse_kl(q, k, weights, index_topk, starts, ends, block_size, **loss):
    """Return top-k indices and the indexer loss, or None without the kernels. Rows without a key get no loss."""
    if lighting_indexer is None:
        return None
    scores, indices = lighting_indexer(q, k, weights, starts, ends, index_topk)
    empty = ~(indices >= 0).any(dim=-1, keepdim=True)
    if empty.any():
        scores = scores.masked_fill(empty, 0.0)
    return indices, scores.sum() * loss["loss_coeff"]


def _unfused_absorbed_dsa_fn(query, key, topk_indices, softmax_scale, v_channels, mask=None):
    """Return attention over the selected keys.

    query [sq, b, heads, d] and key [skv, b, 1, d] give [sq, b, heads, v_channels].
    """
    chosen = torch.full((query.size(1), query.size(0), key.size(0)), float("-inf"), device=query.device)
    _scatter_topk_into_index_mask(chosen, topk_indices, seq_chunk_size=256)
    scores = torch.einsum("sbhd,tbd->bhst", query.float(), key[:, :, 0].float()) * softmax_scale + chosen[:, None]
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1).nan_to_num()
    return torch.einsum("bhst,tbd->sbhd", weights, key[:, :, 0, :v_channels].float()).to(query.dtype)
