"""The indexer over chosen keys in plain PyTorch: the truth that everything else is measured against.

Tensors of all queries and keys are built, in the dtype of the inputs (use float64 for truth).
"""

from __future__ import annotations

import torch

from megacpp_overlays.kernels.attention_target import reference as attention_target
from megacpp_overlays.kernels.index_scores import reference as index_scores
from megacpp_overlays.kernels.top_k import in_torch as top_k


def choose(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    count: int,
    starts: torch.Tensor,
    ends: torch.Tensor,
    use_relu: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and scores of chosen keys: see `function.choose`."""
    scores = index_scores.scores(q, weights, k, use_relu)
    indices = top_k.choose(scores, count, True, (starts, ends))
    return indices, scores.gather(-1, indices.clamp(min=0))


def target(query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the softmax over the chosen keys, summed over heads, (batch, queries, slots): see `function.target`."""
    found = attention_target.target(query, key, scale, _places(indices, key.size(0)) > 0)
    return found.gather(-1, indices.clamp(min=0)).masked_fill(indices < 0, 0.0)


def compare(
    scores: torch.Tensor, sums: torch.Tensor, indices: torch.Tensor, smallest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergence of each row and the difference of each slot: see `function.compare`."""
    valid = indices >= 0
    wanted = sums / sums.sum(dim=-1, keepdim=True).clamp_min(smallest)
    predicted = torch.where(valid, scores, -torch.inf).softmax(dim=-1).nan_to_num(0.0)
    terms = wanted * (wanted.clamp_min(smallest).log() - torch.where(valid, predicted, 1.0).log())
    return terms.masked_fill(~valid, 0.0).sum(dim=-1), (predicted - wanted).masked_fill(~valid, 0.0)


def gradients(
    grad: torch.Tensor,
    indices: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    use_relu: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, weights and k: see `function.gradients`."""
    return index_scores.gradients(_places(indices, k.size(0), grad.to(q.dtype)), q, weights, k, use_relu)


def _places(indices: torch.Tensor, keys: int, numbers: torch.Tensor | None = None) -> torch.Tensor:
    """Return (batch, queries, keys) with the numbers, or ones, where a key was chosen, and 0 elsewhere."""
    chosen = indices >= 0
    held = chosen.double() if numbers is None else numbers.masked_fill(~chosen, 0.0)
    found = held.new_zeros((*indices.shape[:2], keys + 1))
    return found.scatter_(-1, torch.where(chosen, indices, keys), held)[..., :keys]
