"""The indexer over chosen keys in plain PyTorch, some queries at a time: for the CPU, float32 and odd dtypes.

Float32 arithmetic, as upstream's. Keys of some queries are gathered, 4 Mi elements at a time, 32 Mi on a GPU. Blocks are added
in one order, and so are the contributions of the slots of a key, so a rerun gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BLOCK_ELEMENTS, _BLOCK_ELEMENTS_ON_A_GPU = 1 << 22, 1 << 25


def target(query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the softmax over the chosen keys, summed over heads: see `function.target`."""
    result = torch.zeros(indices.shape, dtype=torch.float32, device=query.device)
    if result.numel() == 0:
        return result
    with torch.autocast(query.device.type, enabled=False):
        for rows in _blocks(indices, query.size(2) + query.size(3), query.device.type):
            some = indices[:, rows]
            gathered = _gathered(key.squeeze(2), some)
            scores = torch.einsum("sbhd,bstd->bsht", query[rows].float(), gathered).mul_(scale)
            none = (some < 0).unsqueeze(2)
            scores.masked_fill_(none, torch.finfo(torch.float32).min)
            result[:, rows] = torch.softmax(scores, dim=-1).masked_fill_(none, 0.0).sum(dim=2)
    return result


def compare(scores: torch.Tensor, sums: torch.Tensor, indices: torch.Tensor, smallest: float) -> torch.Tensor:
    """Return the divergence of each row, and write differences over the scores: see `function.compare`."""
    found = torch.zeros(indices.shape[:2], dtype=torch.float32, device=scores.device)
    for rows in _blocks(indices, 1, scores.device.type):
        none = indices[:, rows] < 0
        logits = scores[:, rows].masked_fill(none, torch.finfo(torch.float32).min)
        predicted = torch.log_softmax(logits, dim=-1).masked_fill_(none, 0.0)
        wanted = sums[:, rows] / sums[:, rows].sum(dim=-1, keepdim=True).clamp_min(smallest)
        found[:, rows] = (wanted * (wanted.clamp_min(smallest).log() - predicted)).sum(dim=-1)
        scores[:, rows] = predicted.exp_().masked_fill_(none, 0.0).sub_(wanted)
    return found


def gradients(
    grad: torch.Tensor,
    indices: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    use_relu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, weights and k: see `function.gradients`."""
    keys, batch, dim = k.shape
    of_q, of_weights = q.new_zeros(q.shape), weights.new_zeros(weights.shape)
    of_k = k.new_zeros((batch * keys, dim), dtype=torch.float32)
    elements = torch.arange(batch, device=k.device)[:, None, None] * keys
    if grad.numel() == 0:
        return of_q, of_weights, of_k.view(batch, keys, dim).transpose(0, 1).to(k.dtype)
    with torch.autocast(q.device.type, enabled=False):
        for rows in _blocks(indices, q.size(2) + dim, q.device.type):
            some = indices[:, rows]
            gathered, above = _gathered(k, some), grad[:, rows].masked_fill(some < 0, 0.0).unsqueeze(2)
            queries, weight = q[rows].float(), weights[rows].transpose(0, 1).float().unsqueeze(-1)
            products = torch.einsum("sbhd,bstd->bsht", queries, gathered)
            # A product with 0.0, not a choice: a NaN above reaches every gradient, as it does upstream.
            live = above * (products > 0) if use_relu else above.expand_as(products)
            of_weights[rows] = (products * live).sum(dim=-1).transpose(0, 1).to(weights.dtype)
            live = live * weight
            of_q[rows] = torch.einsum("bsht,bstd->sbhd", live, gathered).to(q.dtype)
            of_slots = torch.einsum("bsht,sbhd->bstd", live, queries)
            order = (some.clamp(min=0) + elements).flatten()
            of_k.index_put_((order,), of_slots.reshape(-1, dim), accumulate=True)
    return of_q, of_weights, of_k.view(batch, keys, dim).transpose(0, 1).to(k.dtype)


def _gathered(key: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the keys of some slots in float32, (batch, queries, slots, dim); any key where there is none."""
    return torch.stack([key[:, at].float()[each.clamp(min=0)] for at, each in enumerate(indices)])


def _blocks(indices: torch.Tensor, elements_of_a_slot: int, device: str) -> Iterator[slice]:
    batch, queries, slots = indices.shape
    most = _BLOCK_ELEMENTS if device == "cpu" else _BLOCK_ELEMENTS_ON_A_GPU
    step = max(1, most // max(1, batch * slots * elements_of_a_slot))
    return (slice(first, min(first + step, queries)) for first in range(0, queries, step))
