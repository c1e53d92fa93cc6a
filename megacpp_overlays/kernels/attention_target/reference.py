"""Attention probabilities summed over heads in plain PyTorch: the truth that everything else is measured against.

The four-axis tensor is built, in the dtype of the inputs (use float64 for truth).
Source: section 2.1 of https://github.com/deepseek-ai/DeepSeek-V3.2-Exp/blob/main/DeepSeek_V3_2.pdf
"""

from __future__ import annotations

import torch


def target(
    query: torch.Tensor, key: torch.Tensor, scale: float, valid: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the softmax over valid keys, summed over heads; 0 where nothing is valid.

    Args:
        query: (queries, batch, heads, dim), floating.
        key: (keys, batch, heads or 1, dim).
        scale: of the products.
        valid: bool, of a shape that broadcasts to (batch, queries, keys).
        mask: is added to the scaled products where they are valid; broadcasts likewise.

    Returns:
        (batch, queries, keys).
    """
    scores = torch.einsum("sbhd,tbhd->bhst", query, key.expand(-1, -1, query.size(2), -1)) * scale
    if mask is not None:
        scores = scores + mask.masked_fill(~mask.isfinite(), 0.0).expand(query.size(1), -1, -1).unsqueeze(1)
    valid = valid.expand(query.size(1), -1, -1).unsqueeze(1).expand(scores.shape)
    probabilities = torch.softmax(scores.masked_fill(~valid, float("-inf")), dim=-1)
    return torch.where(valid, probabilities, 0.0).sum(dim=1)
