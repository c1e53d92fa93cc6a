"""Run in a fresh interpreter under TRITON_INTERPRET=1: errors of the kernels of the indexer over chosen keys, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from chosen_keys_cases import Inputs, Sizes, error, inputs, true_gradients

from megacpp_overlays.kernels.chosen_keys import function as chosen_keys
from megacpp_overlays.kernels.chosen_keys import in_torch, in_triton, query_blocks, reference
from megacpp_overlays.kernels.sparse_attention import tiles

GRID = {
    "packed": Sizes(20, 21, 1, 3, 32, 12, 4, 80, 7),
    "a batch of two": Sizes(9, 9, 2, 2, 24, 9, 2, 40, 9, weights=torch.float32),
    "many heads of attention": Sizes(4, 40, 1, 2, 16, 33, 70, 16, 4),
}
if "few" in sys.argv:
    GRID = {name: GRID[name] for name in ("packed", "a batch of two")}


def facts(sizes: Sizes) -> dict[str, Any]:
    """Return the errors of each operator, in several blocks, compared with float64."""
    query_blocks._BLOCK_BYTES = 4 * sizes.batch * sizes.keys * 6
    in_triton._SCORE_BYTES = 4 * sizes.chosen * sizes.attention_heads * 6
    tiles._LEAST_SLOT_BYTES = tiles._MOST_SLOT_BYTES = 2 * sizes.chosen * sizes.dim * 6
    made = inputs(sizes)
    indices, scores = chosen_keys.choose(made.q, made.weights, made.k, sizes.chosen, made.starts, made.ends)
    wide = [each.double() for each in (made.q, made.weights, made.k)]
    true_indices, true_scores = reference.choose(*wide, sizes.chosen, made.starts, made.ends)
    there = indices >= 0
    scale = sizes.channels**-0.5
    sums = chosen_keys.target(made.query, made.key, indices, scale)
    true_sums = reference.target(made.query.double(), made.key.double(), indices, scale)
    found: dict[str, Any] = {
        "ways": [
            each.__name__.rpartition(".")[2]
            for each in (chosen_keys.target_way(made.query, made.key), chosen_keys.gradient_way(made.q, made.k))
        ],
        "sees nothing": int((~there).all(dim=-1).sum()),
        "indices": torch.equal(indices, true_indices),
        "scores": error(scores[there], true_scores[there]),
        "target": error(sums, true_sums),
        "no target": not bool(sums[~there].any()),
    }
    divergences, differences = reference.compare(scores.double(), sums.double(), indices, 1e-10)
    compared = chosen_keys.compare(scores, sums, indices, 1e-10)
    found["divergences"], found["differences"] = error(compared, divergences), error(scores, differences)
    found["shares"] = [each for use_relu in (True, False) for each in shares(made, indices, use_relu)]
    found["NaN"] = spoilt(made, indices)
    return found


def shares(made: Inputs, indices: Any, use_relu: bool) -> list[float]:
    """Return errors of gradients as shares of PyTorch's, rounded once, and 9 where a rerun gives other bits."""
    found, again = (chosen_keys.gradients(made.grad, indices, made.q, made.weights, made.k, use_relu) for _ in range(2))
    theirs = in_torch.gradients(made.grad, indices, made.q, made.weights, made.k, use_relu)
    true = true_gradients(made, indices, use_relu)
    return [
        error(mine, exact) / max(1e-7, error(other, exact)) if torch.equal(mine, once_more) else 9.0
        for mine, once_more, other, exact in zip(found, again, theirs, true, strict=True)
    ]


def spoilt(made: Inputs, indices: Any) -> bool:
    """Return whether a NaN in the gradient of one slot reaches its query, its weights and its key, and nothing else."""
    grad = made.grad.clone()
    query = grad.size(1) - 1
    grad[0, query, 0] = torch.nan
    of_q, of_weights, of_k = chosen_keys.gradients(grad, indices, made.q, made.weights, made.k, True)
    rows = of_q.isnan().all(dim=-1).all(dim=-1)
    keys = of_k.isnan().all(dim=-1)
    alone = rows.sum() == 1 and keys.sum() == 1
    return bool(alone and rows[query, 0] and keys[indices[0, query, 0], 0] and of_weights[query, 0].isnan().all())


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps({name: facts(sizes) for name, sizes in GRID.items()}))
