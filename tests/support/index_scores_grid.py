"""The index scores of pack 12 on a device, over sizes, dtypes and layouts: facts for the tests, as JSON.

    python index_scores_grid.py DEVICE SHARE SHARES     every SHARES-th entry of the grid, from SHARE on

In shares, so that several processes compile kernels side by side. On `cpu`, with TRITON_INTERPRET=1, the same kernels
run in Triton's interpreter, which cuts bfloat16 instead of rounding it.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import torch
from index_scores_cases import LAYOUTS, LAYOUTS_OF_GRADIENT, lay_out, lay_out_gradient, random, whole

from megacpp_overlays.kernels.index_scores import function as index_scores
from megacpp_overlays.kernels.index_scores import reference

NAMES = ("scores", "q", "weights", "k")
LARGEST = "scores, largest error"


class Entry(NamedTuple):
    """One problem."""

    queries: int
    keys: int
    batch: int
    heads: int
    dim: int
    use_relu: bool = True
    weights: torch.dtype = torch.bfloat16
    layout: str = "contiguous"
    above: str = "contiguous"

    @property
    def is_statistical(self) -> bool:
        """Whether the problem is large enough to compare errors of random numbers."""
        return min(self.queries, self.keys) >= 256


SLICES = {"a slice of queries": 0, "a slice of the batch": 1, "a slice of heads": 2}
"""Layouts in addition to those of index_scores_cases, with the axis that is cut out of a longer one."""
INNERMOST = "heads innermost"

GRID = {
    **{f"dim {dim}": Entry(257, 300, 2, 5, dim) for dim in (64, 80, 96, 128, 192, 256)},
    **{f"dim {dim}, no relu": Entry(257, 300, 2, 5, dim, use_relu=False) for dim in (64, 128, 192)},
    "one head": Entry(256, 384, 2, 1, 128),
    "64 heads": Entry(256, 256, 1, 64, 128),
    "70 heads, dim 192": Entry(250, 300, 1, 70, 192),
    "two tiles a program": Entry(4100, 4100, 1, 3, 128),
    **{
        f"{queries} queries, {keys} keys": Entry(queries, keys, 3, 4, 128)
        for queries, keys in ((1, 1), (1, 257), (257, 1), (7, 65), (65, 7), (130, 130), (130, 257))
    },
    "float32 weights": Entry(256, 384, 2, 8, 128, weights=torch.float32),
    "float32 weights, odd": Entry(65, 130, 1, 3, 80, weights=torch.float32),
    **{layout: Entry(130, 97, 3, 4, 64, layout=layout) for layout in (*LAYOUTS[1:], *SLICES, INNERMOST)},
    **{f"gradient, {above}": Entry(130, 97, 3, 4, 64, above=above) for above in LAYOUTS_OF_GRADIENT[1:]},
}


def facts(entry: Entry, device: str) -> dict[str, Any]:
    """Return the results that are wrong for whole numbers, and for random ones our error and its reference error."""
    tensors = _laid_out(entry, device, *whole(1, *entry[:5]))
    found = compute(*tensors, entry.use_relu)
    wrong = [name for name, *pair in zip(NAMES, found, truths(*tensors, entry.use_relu), strict=True) if _differ(*pair)]
    return {"wrong": wrong, "random": _errors(entry, device) if entry.is_statistical else {}}


def compute(grad: Any, q: Any, weights: Any, k: Any, use_relu: bool = True) -> tuple[torch.Tensor, ...]:
    """Return the scores and the gradients of q, weights and k."""
    return index_scores.scores(q, weights, k, use_relu), *index_scores.gradients(grad, q, weights, k, use_relu)


def truths(grad: Any, q: Any, weights: Any, k: Any, use_relu: bool = True) -> tuple[torch.Tensor, ...]:
    """Return the results of `compute` in float64, by the reference."""
    exact = [each.double() for each in (q, weights, k)]
    return reference.scores(*exact, use_relu), *reference.gradients(grad.double(), *exact, use_relu)


def four_axes(q: Any, weights: Any, k: Any, use_relu: bool = True) -> torch.Tensor:
    """Return the scores through the four-axis tensor, in float32, as upstream computes them."""
    products = torch.einsum("sbhd,tbd->sbht", q.float(), k.float())
    return ((products.relu() if use_relu else products) * weights.unsqueeze(-1)).sum(dim=2).transpose(0, 1)


def by_hand(grad: Any, q: Any, weights: Any, k: Any) -> tuple[torch.Tensor, ...]:
    """Return the gradients as the backward of upstream's fused loss takes them, in float32."""
    products = torch.einsum("sbhd,tbd->sbht", q.float(), k.float())
    above = grad.transpose(0, 1).unsqueeze(2)
    live = above * weights.unsqueeze(-1) * (products > 0).float()
    of_weights = (above * products.relu()).sum(dim=-1)
    of_q = torch.einsum("sbht,tbd->sbhd", live, k.float())
    return of_q, of_weights, torch.einsum("sbht,sbhd->tbd", live, q.float())


def error(found: torch.Tensor, true: torch.Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return float((found.double() - true).norm() / true.norm())


def largest_error(found: torch.Tensor, true: torch.Tensor) -> float:
    """Return the largest error, over the largest value."""
    return float((found.double() - true).abs().max() / true.abs().max())


def _differ(found: torch.Tensor, true: torch.Tensor) -> bool:
    if found.device.type == "cpu" and found.dtype != torch.float32:
        return not bool(((found.double() - true).abs() <= 2.0**-7 * true.abs()).all())
    return not torch.equal(found, true.to(found.dtype))


def _errors(entry: Entry, device: str) -> dict[str, tuple[float, float]]:
    """Return errors with reference errors: scores by a float32 einsum, gradients by rounding, or by autograd in float32."""
    tensors = _laid_out(entry, device, *random(2, *entry[:5]))
    grad, *inputs = tensors
    single = [each.detach().float().requires_grad_() for each in inputs]
    scores = four_axes(*single, entry.use_relu)
    others = (scores.detach(), *torch.autograd.grad(scores, single, grad))
    results, true_results = compute(*tensors, entry.use_relu), truths(*tensors, entry.use_relu)
    return {
        LARGEST: (largest_error(results[0], true_results[0]), largest_error(others[0], true_results[0])),
        **{
            name: (error(mine, true), error(other if mine.dtype == torch.float32 else true.to(mine.dtype), true))
            for name, mine, true, other in zip(NAMES, results, true_results, others, strict=True)
        },
    }


def _laid_out(entry: Entry, device: str, q: Any, weights: Any, k: Any, grad: Any) -> list[torch.Tensor]:
    """Return the gradient and the inputs, with the strides of the entry."""
    q, weights, k, grad = (each.to(device) for each in (q, weights.to(entry.weights), k, grad))
    inputs = [q, weights, k]
    if entry.layout == INNERMOST:
        inputs[0] = q.transpose(2, 3).contiguous().transpose(2, 3)
    elif entry.layout in SLICES:
        axis = SLICES[entry.layout]
        inputs = [_cut_out(each, axis) if each is not k or axis < 2 else each for each in inputs]
    else:
        inputs = lay_out(entry.layout, q, weights, k)
    return [lay_out_gradient(entry.above, grad), *inputs]


def _cut_out(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the same numbers as the middle of a longer tensor."""
    edge = torch.full_like(tensor.narrow(axis, 0, 1), 99)
    return torch.cat([edge, tensor, edge], dim=axis).narrow(axis, 1, tensor.size(axis))


def main() -> None:
    """Print the facts of a share of the grid."""
    device, share, shares = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    names = list(GRID)[share::shares]
    print(json.dumps({name: facts(GRID[name], device) for name in names}))  # noqa: T201 - it reports by printing


if __name__ == "__main__":
    main()
