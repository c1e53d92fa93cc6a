"""The choice of keys in blocks of queries: index scores of all keys exist for one block at a time.

Scores and choice are those of `index_scores` and `top_k`. Both get the bounds as arguments, so masking needs no pass of its
own. A block is small compared with the tensors that a layer keeps, and large enough to keep a device busy.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megacpp_overlays.kernels.index_scores import function as index_scores
from megacpp_overlays.kernels.top_k import function as top_k

_BLOCK_BYTES, _BLOCK_BYTES_ON_A_GPU = 1 << 24, 1 << 29
"""Of the scores of a block."""
_TILE = 128
"""Blocks are multiples of this many queries, the tile of a program of the index scores."""


def choose(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    count: int,
    starts: torch.Tensor,
    ends: torch.Tensor,
    use_relu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and scores of chosen keys: see `function.choose`."""
    queries, batch, _, dim = q.shape
    keys = k.size(0)
    indices = torch.empty((batch, queries, count), dtype=torch.int64, device=q.device)
    chosen = torch.empty((batch, queries, count), dtype=torch.float32, device=q.device)
    if indices.numel() == 0:
        return indices, chosen
    way = index_scores.implementation(q.dtype, k.dtype, dim, q.device)
    chooser = top_k.implementation(torch.float32, keys, count, q.device)
    # Bounds may lie far outside, as int64 positions of a whole job: within int32 they are clamped first.
    starts, ends = (each.to(q.device).clamp(0, keys).to(torch.int32) for each in (starts, ends))
    for rows in _blocks(queries, 4 * batch * keys, q.device.type):
        within = (starts[rows], ends[rows])
        found = way.scores(q[rows], weights[rows], k, use_relu, within)
        places = chooser.choose(found, count, True, within)
        indices[:, rows] = places
        chosen[:, rows] = found.gather(-1, places.clamp_(min=0))
        del found, places  # or they are still held while those of the next block are computed
    return indices, chosen


def is_one_block(queries: int, scores_of_a_row: int, device: str) -> bool:
    """Return whether scores of so many queries on a device, cpu or cuda, are one block."""
    return queries <= _step(4 * scores_of_a_row, device)


def _blocks(queries: int, bytes_of_a_row: int, device: str) -> Iterator[slice]:
    step = _step(bytes_of_a_row, device)
    return (slice(first, min(first + step, queries)) for first in range(0, queries, step))


def _step(bytes_of_a_row: int, device: str) -> int:
    most = _BLOCK_BYTES if device == "cpu" else _BLOCK_BYTES_ON_A_GPU
    step = max(1, most // max(1, bytes_of_a_row))
    return step // _TILE * _TILE or step
