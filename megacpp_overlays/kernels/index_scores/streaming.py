"""Index scores in plain PyTorch, one head and some queries at a time: for the CPU, float32 and odd dtypes.

Float32 arithmetic, as upstream's. In addition to the results it holds the keys and their gradient in float32, some queries of a
head, and at most three blocks of 4 Mi elements, 32 Mi on a GPU, (batch, rows, keys), or of one row if that is longer.
Heads and blocks are added in one order, so a rerun gives the same bits. Blocks of another size may give other bits, because a
product of other rows may be added up in another order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BLOCK_ELEMENTS, _BLOCK_ELEMENTS_ON_A_GPU = 1 << 22, 1 << 25
"""Elements of one block: large enough for the products, small compared with any score matrix worth streaming."""


def scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    use_relu: bool,
    within: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the index scores: see `index_scores.scores`. Scores outside the bounds are computed as well."""
    queries, batch, heads, _ = q.shape
    result = torch.zeros((batch, queries, k.size(0)), dtype=torch.float32, device=q.device)
    keys = k.permute(1, 2, 0).float()
    with _float32(q):
        for rows in _blocks(queries, batch * k.size(0), q.device.type):
            for head in range(heads):
                products = torch.bmm(q[rows, :, head].transpose(0, 1).float(), keys)
                if use_relu:
                    products.relu_()
                result[:, rows].addcmul_(products, weights[rows, :, head, None].transpose(0, 1).float())
                del products  # or it is still held while the next head's are computed
    return result


def gradients(
    grad: torch.Tensor, q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, use_relu: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, weights and k: see `index_scores.gradients`."""
    queries, batch, heads, _ = q.shape
    of_q, of_weights = q.new_empty(q.shape), weights.new_empty(weights.shape)
    of_k = k.new_zeros(k.shape, dtype=torch.float32)
    keys = k.transpose(0, 1).float()
    with _float32(q):
        for rows in _blocks(queries, batch * k.size(0), q.device.type):
            above = grad[:, rows].float()
            for head in range(heads):
                head_queries = q[rows, :, head].transpose(0, 1).float()
                products = torch.bmm(head_queries, keys.mT)
                # A product with 0.0, not a choice: a NaN above reaches every gradient, as it does upstream.
                live = above * (products > 0) if use_relu else above
                of_weights[rows, :, head] = products.mul_(live).sum(dim=-1).T.to(weights.dtype)
                live = live * weights[rows, :, head, None].transpose(0, 1).float()
                of_q[rows, :, head] = torch.bmm(live, keys).transpose(0, 1).to(q.dtype)
                of_k.transpose(0, 1).baddbmm_(live.mT, head_queries)
                del products, live
    return of_q, of_weights, of_k.to(k.dtype)


def _float32(q: torch.Tensor) -> torch.autocast:
    """Keep autocast, under which an operator may run, from turning the products into its own dtype."""
    return torch.autocast(q.device.type, enabled=False)


def _blocks(queries: int, elements_of_a_row: int, device: str) -> Iterator[slice]:
    elements = _BLOCK_ELEMENTS if device == "cpu" else _BLOCK_ELEMENTS_ON_A_GPU
    step = max(1, elements // max(1, elements_of_a_row))
    return (slice(first, min(first + step, queries)) for first in range(0, queries, step))
