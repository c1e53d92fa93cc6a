"""Reference for index scores: errors against float64, and top-k choices of two ways to compute them."""

from __future__ import annotations

from typing import Any

import timing
import torch

from megacpp_overlays.kernels.index_scores import function as index_scores
from megacpp_overlays.kernels.index_scores import reference as index_scores_reference

ROWS = 64
"""Queries of each batch element that are compared with float64."""
ROUNDING = 2.0**-24
"""Half a unit in the last place of float32, relative."""


def some_rows(q: Any, weights: Any, k: Any) -> tuple[list[Any], Any]:
    """Return random queries of each batch element, and their scores in float64, (batch, rows, keys)."""
    picked = [torch.randperm(q.size(0), device=q.device)[:ROWS] for _ in range(q.size(1))]
    expected = [
        index_scores_reference.scores(
            q[rows, i : i + 1].double(), weights[rows, i : i + 1].double(), k[:, i : i + 1].double()
        )
        for i, rows in enumerate(picked)
    ]
    return picked, torch.cat(expected)


def score_errors(result: Any, picked: list[Any], expected: Any) -> dict[str, float]:
    """Return the errors of scores on the picked rows."""
    return errors(torch.stack([scores[rows] for scores, rows in zip(result, picked, strict=True)]), expected)


def errors(found: Any, expected: Any) -> dict[str, float]:
    """Return the largest difference over the largest value, and the norm of the differences over that of the values."""
    difference = found.double() - expected
    return {"max": timing.relative_error(found, expected), "norm": float(difference.norm() / expected.norm())}


def true_gradients(grad: Any, q: Any, weights: Any, k: Any) -> tuple[Any, Any, Any]:
    """Return the gradients of the first batch element in float64, a slice of queries at a time."""
    of_q, of_weights, of_k = [], [], 0
    keys = k[:, :1].double()
    step = max(1, (1 << 27) // (q.size(2) * k.size(0)))
    for first in range(0, q.size(0), step):
        rows = slice(first, first + step)
        part = index_scores_reference.gradients(
            grad[:1, rows].double(), q[rows, :1].double(), weights[rows, :1].double(), keys
        )
        of_q.append(part[0])
        of_weights.append(part[1])
        of_k = of_k + part[2]
    return torch.cat(of_q), torch.cat(of_weights), of_k


def gradient_errors(found: tuple[Any, ...], expected: tuple[Any, ...]) -> dict[str, dict[str, float]]:
    """Return the errors of the gradients of the first batch element, by input."""
    names = ("q", "weights", "k")
    return {name: errors(each[:, :1], true) for name, each, true in zip(names, found, expected, strict=True)}


def top_k_agreement(theirs: Any, ours: Any, inputs: tuple[Any, Any, Any], topk: int) -> dict[str, Any]:
    """Return how far two score matrices choose the same keys.

    Rounding is 2**-24 of the sum of the magnitudes that a score adds up; a sum of h heads in float32 may be off by
    (h - 1) times that, in either matrix.

    Returns:
        Rows and how many of them choose differently; the largest gap, in `theirs`, between a key that only one chose
        and one that only the other chose; and the largest difference between the two matrices. The last two are in
        units of rounding.
    """
    q, weights, k = inputs
    magnitude = index_scores.scores(q, weights.abs(), k)
    differing, gap, apart = 0, 0.0, 0.0
    for their, our, sums in zip(theirs, ours, magnitude, strict=True):
        unit = sums * ROUNDING
        apart = max(apart, float(((their - our).abs() / unit.clamp_min(torch.finfo(torch.float32).tiny)).max()))
        chosen, also = (_chosen(scores, topk) for scores in (their, our))
        only, instead = chosen & ~also, also & ~chosen
        rows = only.any(dim=1)
        if not rows.any():
            continue
        differing += int(rows.sum())
        their, only, instead, unit = their[rows], only[rows], instead[rows], unit[rows]
        lost = their.masked_fill(~only, -torch.inf).amax(dim=1)
        won = their.masked_fill(~instead, torch.inf).amin(dim=1)
        units = unit.masked_fill(~(only | instead), 0).amax(dim=1)
        gap = max(gap, float(((lost - won) / units).max()))
    rows_in_all = theirs.size(0) * theirs.size(1)
    return {
        "topk": min(topk, theirs.size(2)), "rows": rows_in_all, "rows_that_differ": differing,
        "largest_gap": gap, "largest_difference": apart,
    }  # fmt: skip


def _chosen(scores: Any, topk: int) -> Any:
    indices = scores.topk(min(topk, scores.size(-1)), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, indices, value=True)
