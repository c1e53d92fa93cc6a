"""Sum the gradients of heads into the groups that the heads share."""

from __future__ import annotations

import torch


def sum_groups(per_head: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the sums over contiguous blocks of heads // groups heads.

    `Tensor.sum` adds up half precision in float32 and rounds once, in the same order on every run. So for one group the result
    equals upstream's sum over all heads.

    Args:
        per_head: (batch, sequence, rank, heads, dim), floating.
        groups: a divisor of heads.

    Returns:
        (batch, sequence, rank, groups, dim), contiguous, in the dtype of `per_head`.

    Raises:
        ValueError: heads are not divisible by groups.
    """
    heads = per_head.shape[3]
    if heads % groups:
        raise ValueError(f"{heads} heads are not divisible by {groups} groups")
    return per_head.unflatten(3, (groups, heads // groups)).sum(dim=4)
