"""How right a linear cross entropy is: losses and gradients in float64, and the errors of others against them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from linear_cross_entropy_work import Data

LARGEST_BLOCK = 1 << 27
"""Logits that are in float64 at a time."""
FREQUENT = 64
"""So many classes, the most frequent ones, count as frequent: their weight gradients add up the most."""


@dataclass(frozen=True)
class Truth:
    """What is right, in float64."""

    losses: Any
    of_x: Any
    of_weight: Any
    frequent: Any
    """Rows of `of_weight`."""


def truth(data: Data, reduction: str) -> Truth:
    """Return losses and gradients in float64, a slice of tokens at a time."""
    x, weight, target = data.x.detach(), data.weight.detach().double(), data.target
    scale = (
        data.incoming
        if reduction == "none"
        else torch.full_like(data.incoming, 1 / target.numel(), dtype=torch.float64)
    )
    losses = torch.empty(x.size(0), dtype=torch.float64, device=x.device)
    of_x, of_weight = torch.empty_like(x, dtype=torch.float64), torch.zeros_like(weight)
    step = max(1, LARGEST_BLOCK // weight.size(0))
    for first in range(0, x.size(0), step):
        rows = slice(first, first + step)
        block, label = x[rows].double(), target[rows, None]
        logits = block @ weight.t()
        log_total = torch.logsumexp(logits, dim=1, keepdim=True)
        losses[rows] = (log_total - logits.gather(1, label)).squeeze(1)
        gradient = logits.sub_(log_total).exp_()
        gradient.scatter_add_(1, label, torch.full_like(log_total, -1.0))
        gradient.mul_(scale[rows, None].double())
        of_x[rows] = gradient @ weight
        of_weight.addmm_(gradient.t(), block)
    counts = torch.bincount(target, minlength=weight.size(0))
    frequent = counts.topk(min(FREQUENT, weight.size(0))).indices
    return Truth(losses if reduction == "none" else losses.mean(), of_x, of_weight, frequent)


def errors(losses: Any, gradients: tuple[Any, Any], true: Truth) -> dict[str, dict[str, float]]:
    """Return the errors of losses, of both gradients, and of the weight gradient of frequent classes."""
    of_x, of_weight = gradients
    return {
        "loss": difference(losses.detach(), true.losses),
        "x": difference(of_x, true.of_x),
        "weight": difference(of_weight, true.of_weight),
        "frequent": difference(of_weight[true.frequent], true.of_weight[true.frequent]),
    }


def difference(found: Any, expected: Any) -> dict[str, float]:
    """Return the norm of the differences over that of the values, and the largest one over the largest value."""
    apart = found.double().sub_(expected) if found.dtype != torch.float64 else found - expected
    largest = float(apart.abs().max() / expected.abs().max())
    return {"norm": float(apart.norm() / expected.norm()), "max": largest}
