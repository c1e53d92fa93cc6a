"""The k largest numbers of each row by sorting, in plain PyTorch: for every dtype and device, and rows of any length.

The definition in four lines, which the kernel is held to; it is slower than `torch.topk`.
"""

from __future__ import annotations

import torch


def choose(
    scores: torch.Tensor, k: int, mark_infinite: bool, within: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """Return the positions: see `top_k.choose`. With bounds, (queries,) each, scores outside count as negative infinity."""
    keys = scores.size(-1)
    if within is not None:
        place = torch.arange(keys, device=scores.device)
        starts, ends = (each[:, None] for each in within)
        scores = scores.masked_fill((place < starts) | (place >= ends), -torch.inf)
    places = _without_bits_that_mean_nothing(scores).argsort(dim=-1, descending=True, stable=True)[..., :k]
    if mark_infinite:
        places = places.masked_fill(scores.gather(-1, places) == -torch.inf, keys)
    places = places.sort(dim=-1).values
    return places.masked_fill(places == keys, -1)


def _without_bits_that_mean_nothing(scores: torch.Tensor) -> torch.Tensor:
    """Return the numbers with one zero, and infinity for a NaN: on some devices a sort looks at bits."""
    if not scores.is_floating_point():
        return scores
    return torch.where(scores == 0, 0.0, scores).masked_fill(scores.isnan(), torch.inf)
