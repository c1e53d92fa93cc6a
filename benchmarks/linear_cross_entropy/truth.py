"""Reference for a linear cross entropy: losses and gradients in float64, and errors against them.

The logits of all tokens in float64 would not fit; those of a slice do, and the products of a slice run on the tensor
cores, which know float64 on the GPUs of data centres.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from linear_cross_entropy.work import IGNORED, Data

LARGEST_BLOCK = 1 << 27
"""Logits that are in float64 at a time."""
FREQUENT = 64
"""So many classes, the most frequent ones, count as frequent: their weight gradients add up the most."""


@torch.no_grad()
def truth(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    scale: torch.Tensor,
    *,
    ignore_index: int = IGNORED,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss of each token, and the gradients of `(losses * scale).sum()` for hidden and weight.

    Args:
        hidden: (tokens, hidden size), any floating dtype, taken as it is.
        weight: (classes, hidden size).
        target: (tokens,), integer.
        scale: gradient that arrives for each token, (tokens,).
        ignore_index: tokens with this target have loss 0.

    Returns:
        (tokens,), (tokens, hidden size) and (classes, hidden size), all float64.
    """
    wide = weight.double()
    losses = torch.empty(hidden.shape[0], dtype=torch.float64, device=hidden.device)
    of_hidden = torch.empty(hidden.shape, dtype=torch.float64, device=hidden.device)
    of_weight = torch.zeros_like(wide)
    step = max(1, LARGEST_BLOCK // weight.shape[0])
    for start in range(0, hidden.shape[0], step):
        rows = slice(start, start + step)
        x, kept = hidden[rows].double(), target[rows] != ignore_index
        column = torch.where(kept, target[rows], 0).unsqueeze(1)
        values = x @ wide.t()
        own, lse = values.gather(1, column).squeeze(1), values.logsumexp(1)
        losses[rows] = torch.where(kept, lse - own, 0.0)
        values.sub_(lse.unsqueeze(1)).exp_()
        values.scatter_add_(1, column, torch.full_like(own, -1).unsqueeze(1))
        values.mul_(torch.where(kept, scale[rows], 0.0).double().unsqueeze(1))
        of_hidden[rows] = values @ wide
        of_weight.addmm_(values.t(), x)
    return losses, of_hidden, of_weight


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the expected value; the former where the latter is 0."""
    expected = expected.double()
    whole = torch.linalg.vector_norm(expected).item()
    apart = torch.linalg.vector_norm(found.double() - expected).item()
    return apart / whole if whole else apart


# --- of the ways that race -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """The right results, in float64."""

    losses: Any
    of_x: Any
    of_weight: Any
    frequent: Any
    """Rows of `of_weight`."""


def truth_of(data: Data, reduction: str) -> Truth:
    """Return losses and gradients with this reduction."""
    scale, kept = data.incoming, data.target != IGNORED
    if reduction == "mean":
        scale = torch.full_like(scale, 1.0, dtype=torch.float64) / kept.sum()
    losses, of_x, of_weight = truth(data.x, data.weight, data.target, scale)
    counts = torch.bincount(data.target[kept], minlength=data.weight.size(0))
    frequent = counts.topk(min(FREQUENT, data.weight.size(0))).indices
    return Truth(losses if reduction == "none" else losses.sum() / kept.sum(), of_x, of_weight, frequent)


def errors(losses: Any, gradients: tuple[Any, Any], true: Truth) -> dict[str, dict[str, float]]:
    """Return the errors of losses, of both gradients, and of the weight gradient of frequent classes."""
    of_x, of_weight = gradients
    return {
        "loss": difference(losses.detach(), true.losses),
        "x": difference(of_x, true.of_x),
        "weight": difference(of_weight, true.of_weight),
        "frequent": difference(of_weight[true.frequent], true.of_weight[true.frequent]),
    }


def from_plain(gradients: tuple[Any, Any], plain: tuple[Any, Any]) -> dict[str, dict[str, float]]:
    """Return how far two gradients are from those of plain PyTorch."""
    pairs = zip(("x", "weight"), gradients, plain, strict=True)
    return {f"{name} from plain": difference(mine, theirs.double()) for name, mine, theirs in pairs}


def rounded(true: Truth, dtype: Any) -> dict[str, dict[str, float]]:
    """Return the errors of the right results after rounding to the dtype of the gradients, the least possible ones."""
    return errors(true.losses.float(), (true.of_x.to(dtype), true.of_weight.to(dtype)), true)


def difference(found: Any, expected: Any) -> dict[str, float]:
    """Return the norm of the differences over that of the values, and the largest one over the largest value."""
    apart = found.double().sub_(expected) if found.dtype != torch.float64 else found - expected
    largest = float(apart.abs().max() / expected.abs().max())
    return {"norm": float(apart.norm() / expected.norm()), "max": largest}
