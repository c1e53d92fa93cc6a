"""Reference of sparse attention in plain PyTorch, against which the other implementations are measured.

It materializes the chosen keys, (batch, queries, slots, dim), and the scores, (batch, queries, heads, slots). It computes in
the dtype of the inputs; use float64 for exact results. Autograd differentiates it.

Source: section 2.1 of https://github.com/deepseek-ai/DeepSeek-V3.2-Exp/blob/main/DeepSeek_V3_2.pdf. Attention sinks are those of
https://cdn.openai.com/pdf/419b6906-9da6-406c-a19d-1bb078ac7637/oai_gpt-oss_model_card.pdf: a sink is a score that takes part in
the softmax and has no value.
"""

from __future__ import annotations

import torch

from megacpp_overlays.kernels.sparse_attention.quantized_keys import QuantizedKeys


def attend(
    query: torch.Tensor,
    key: torch.Tensor | QuantizedKeys,
    indices: torch.Tensor,
    scale: float,
    value_channels: int,
    sink: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over the chosen keys, and the log-sum-exp of the scores.

    A key that is chosen twice counts twice.

    Args:
        query: (queries, batch, heads, dim), floating.
        key: (keys, batch, 1, dim), at least one key. The heads share a key, and its first `value_channels` are the value.
            Quantized keys are dequantized to the dtype of query.
        indices: (batch, queries, slots), integers. An index below 0, or not below the number of keys, chooses no key.
        scale: factor of the products of query and key before the softmax.
        value_channels: from 1 to dim.
        sink: (heads,), a score of each head in addition to the scores of its keys.
        bias: (batch, queries, slots), added to the scaled products of a slot.

    Returns:
        (queries, batch, heads, value_channels), 0 where no key was chosen, and (queries, batch, heads), there the score of the
        sink, or -inf without one; both in the dtype of query.
    """
    if isinstance(key, QuantizedKeys):
        key = key.opened(query.dtype)
    chosen = (indices >= 0) & (indices < key.size(0))
    rows = torch.where(chosen, indices, 0).long()
    batches = torch.arange(key.size(1), device=key.device)[:, None, None]
    keys = key[:, :, 0].transpose(0, 1)[batches, rows].masked_fill(~chosen[..., None], 0.0)
    scores = torch.einsum("sbhd,bstd->bsht", query, keys) * scale
    if bias is not None:
        scores = scores + bias[:, :, None].to(scores.dtype)
    scores = scores.masked_fill(~chosen[:, :, None], float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores.dtype).expand(*scores.shape[:2], -1)[..., None]], dim=-1)
    largest = (
        scores.detach().amax(dim=-1, keepdim=True) if scores.size(-1) else scores.new_zeros((*scores.shape[:3], 1))
    )
    largest = largest.masked_fill(largest == float("-inf"), 0.0)
    weights = torch.exp(scores - largest)
    total = weights.sum(dim=-1, keepdim=True)
    shares = weights / total.masked_fill(total == 0, 1.0)
    output = torch.einsum("bsht,bstd->sbhd", shares[..., : indices.size(-1)], keys[..., :value_channels])
    return output, (largest + total.log()).squeeze(-1).transpose(0, 1)
