"""Stand-in for dsa of main in June 2026: same names, signatures and behaviour, none of its code."""

import torch
from megatron.core.transformer.experimental_attention_variant import dsa_masking


def _unfused_absorbed_dsa_fn(query, key, topk_indices, softmax_scale, v_channels, mask=None):
    """Return attention over the selected keys.

    query [sq, b, heads, d] and key [skv, b, 1, d] give [sq, b, heads, v_channels].
    """
    chosen = torch.full((query.size(1), query.size(0), key.size(0)), float("-inf"), device=query.device)
    dsa_masking.scatter_topk_into_index_mask(chosen, topk_indices, seq_chunk_size=256)
    scores = torch.einsum("sbhd,tbd->bhst", query.float(), key[:, :, 0].float()) * softmax_scale + chosen[:, None]
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1).nan_to_num()
    return torch.einsum("bhst,tbd->sbhd", weights, key[:, :, 0, :v_channels].float()).to(query.dtype)
