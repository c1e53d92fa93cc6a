"""The k largest numbers of each row by sorting, in plain PyTorch: for every dtype and device, and rows of any length.

The definition in four lines, which the kernel is held to; it is slower than `torch.topk`.
"""

from __future__ import annotations

import torch


def choose(scores: torch.Tensor, k: int, mark_infinite: bool) -> torch.Tensor:
    """Return the positions: see `top_k.choose`."""
    ordered = _without_signs_that_mean_nothing(scores).argsort(dim=-1, descending=True, stable=True)
    places = ordered[..., :k].sort(dim=-1).values
    if mark_infinite:
        places = places.masked_fill(scores.gather(-1, places) == -torch.inf, -1)
    return places


def _without_signs_that_mean_nothing(scores: torch.Tensor) -> torch.Tensor:
    """Return the numbers with one zero and one NaN: on some devices a sort looks at bits."""
    if not scores.is_floating_point():
        return scores
    return torch.where(scores == 0, 0.0, scores).masked_fill(scores.isnan(), torch.nan)
