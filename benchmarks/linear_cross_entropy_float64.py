"""Linear cross entropy in float64, a slice of tokens at a time: the truth that the benchmarks on GPUs compare with.

The logits of all tokens in float64 would not fit; those of a slice do, and the products of a slice run on the tensor
cores, which know float64 on the GPUs of data centres.
"""

from __future__ import annotations

import torch

SLICE = 1024


@torch.no_grad()
def truth(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, *, ignore_index: int = -100
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
    for start in range(0, hidden.shape[0], SLICE):
        rows = slice(start, start + SLICE)
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
    """Return the norm of the difference over the norm of what is expected; 0 where both are."""
    expected = expected.double()
    whole = torch.linalg.vector_norm(expected).item()
    apart = torch.linalg.vector_norm(found.double() - expected).item()
    return apart / whole if whole else apart
