"""Attention probabilities summed over heads in plain PyTorch, one head and some queries at a time.

For the CPU, float32 and odd dtypes. Float32 arithmetic, as upstream's. In addition to the result it holds the keys of one head
in float32 and a few blocks of 4 Mi elements, 32 Mi on a GPU, (batch, rows, keys), or of one row if that is longer.
Heads are added in one order, so a rerun gives the same bits.
"""

from __future__ import annotations

import torch

from megacpp_overlays.kernels.attention_target.blocks import row_blocks
from megacpp_overlays.kernels.attention_target.validity import Validity

_SMALLEST = 1e-10
"""Of the denominator, as upstream has it."""


def target(query: torch.Tensor, key: torch.Tensor, scale: float, valid: Validity) -> torch.Tensor:
    """Return the softmax over valid keys, summed over heads: see `attention_target.target`."""
    queries, batch, heads, _ = query.shape
    keys = key.size(0)
    result = torch.zeros((batch, queries, keys), dtype=torch.float32, device=query.device)
    if result.numel() == 0:
        return result
    # Autocast, under which an operator may run, would turn the products into its own dtype.
    with torch.autocast(query.device.type, enabled=False):
        for rows in row_blocks(queries, batch * keys, query.device.type):
            invalid, mask = ~valid.of_rows(rows), valid.mask_of_rows(rows)
            mask = None if mask is None else mask.masked_fill(~mask.isfinite(), 0.0)
            nothing = invalid.all(dim=-1, keepdim=True)
            for head in range(heads):
                shared = key[:, :, head if key.size(2) > 1 else 0].permute(1, 2, 0).float()
                scores = torch.bmm(query[rows, :, head].transpose(0, 1).float(), shared).mul_(scale)
                if mask is not None:
                    scores += mask
                scores.masked_fill_(invalid, torch.finfo(torch.float32).min)
                peak = scores.amax(dim=-1, keepdim=True).masked_fill_(nothing, 0.0)
                scores.sub_(peak).exp_().masked_fill_(invalid, 0.0)
                total = scores.sum(dim=-1, keepdim=True).clamp_min_(_SMALLEST)
                result[:, rows].add_(scores.div_(total))
                del scores  # or it is still held while the next head's are computed
    return result
