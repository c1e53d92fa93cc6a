"""The choice of keys by index scores, the target of the sparse indexer loss and its gradients, in tokens times chosen.

Four custom operators, so that CUDA graphs and torch.compile treat each as one step. Scores of all keys exist for some
queries at a time. Of the others only the scores, targets and gradients of the chosen keys are kept. Products run on tensor
cores for bfloat16 where they were measured, in plain PyTorch for everything else.

Source: section 2.1 of https://github.com/deepseek-ai/DeepSeek-V3.2-Exp/blob/main/DeepSeek_V3_2.pdf
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

from megacpp_overlays.kernels.chosen_keys import in_torch, query_blocks
from megacpp_overlays.kernels.top_k import function as top_k


def choose(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    count: int,
    starts: torch.Tensor,
    ends: torch.Tensor,
    use_relu: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which keys within its bounds have a query's largest index scores, and these scores. Not differentiable.

    Args:
        q: (queries, batch, heads, dim), floating, any strides.
        weights: (queries, batch, heads), floating.
        k: (keys, batch, dim), floating; the heads share it.
        count: how many are chosen, from 0 to keys.
        starts: (queries,), integers: the first key that a query may choose.
        ends: (queries,), integers: the one behind the last.
        use_relu: whether products are rectified before they are weighted.

    Returns:
        (batch, queries, count), int64, in ascending order, as `top_k.choose` defines it; -1, after all others, where there are
        fewer keys within the bounds, or their score is negative infinity. And (batch, queries, count), float32, some number
        where there is none.

    Raises:
        ValueError: the shapes do not belong together.
    """
    if (q.ndim, k.ndim) != (4, 3) or weights.shape != q.shape[:3] or k.shape[1:] != (q.size(1), q.size(3)):
        raise ValueError(
            "q, weights and k must be (queries, batch, heads, dim), (queries, batch, heads) and (keys, batch, dim), not "
            f"{tuple(q.shape)}, {tuple(weights.shape)} and {tuple(k.shape)}"
        )
    if (starts.shape, ends.shape) != ((q.size(0),), (q.size(0),)) or not 0 <= count <= k.size(0):
        raise ValueError(f"starts and ends must be (queries,), and count from 0 to {k.size(0)}, not {count}")
    indices, scores = _choose(q, weights, k, count, starts, ends, use_relu)
    return indices, scores


def target(query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the softmax over the chosen keys, summed over heads. Not differentiable.

    Args:
        query: (queries, batch, heads, dim), floating, any strides.
        key: (keys, batch, 1, dim), floating.
        indices: (batch, queries, slots), int64: a key, or -1 behind all others.
        scale: of the products.

    Returns:
        (batch, queries, slots), float32, 0 where no key is.

    Raises:
        ValueError: the shapes do not belong together.
    """
    if query.ndim != 4 or key.shape != (key.size(0), query.size(1), 1, query.size(3)):
        raise ValueError(
            "query and key must be (queries, batch, heads, dim) and (keys, batch, 1, dim), not "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    _check_indices(indices, query)
    result: torch.Tensor = _target(query, key, indices, scale)
    return result


def compare(scores: torch.Tensor, sums: torch.Tensor, indices: torch.Tensor, smallest: float) -> torch.Tensor:
    """Return the divergence of the softmax over chosen scores from the normalised target; write their difference over the scores.

    Args:
        scores: (batch, queries, slots), float32, contiguous; prediction less target is written over them, 0 where no key is.
        sums: (batch, queries, slots), float32: the target before it is normalised, 0 where no key is.
        indices: (batch, queries, slots), int64: a key, or -1 behind all others.
        smallest: lower bound of the sum of a row's target, and of the arguments of logarithms.

    Returns:
        (batch, queries), float32.

    Raises:
        ValueError: the shapes do not belong together, or scores are not contiguous.
    """
    if not scores.shape == sums.shape == indices.shape or scores.ndim != 3 or not scores.is_contiguous():
        raise ValueError(
            "scores, sums and indices must be (batch, queries, slots), and scores contiguous, not "
            f"{tuple(scores.shape)}, {tuple(sums.shape)} and {tuple(indices.shape)}"
        )
    result: torch.Tensor = _compare(scores, sums, indices, smallest)
    return result


def gradients(
    grad: torch.Tensor,
    indices: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    use_relu: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, weights and k, each in the dtype of its input, for a gradient of chosen index scores.

    Args:
        grad: (batch, queries, slots), float32; slots without a key are ignored.
        indices: (batch, queries, slots), int64: a key, or -1 behind all others; no key twice in a row.
        q: see `choose`, as are the next three.

    Raises:
        ValueError: the shapes do not belong together.
    """
    _check_indices(indices, q)
    if grad.shape != indices.shape:
        raise ValueError(f"grad must be of the shape of indices, {tuple(indices.shape)}, not {tuple(grad.shape)}")
    of_q, of_weights, of_k = _gradients(grad, indices, q, weights, k, use_relu)
    return of_q, of_weights, of_k


def _check_indices(indices: torch.Tensor, query: torch.Tensor) -> None:
    if indices.ndim != 3 or indices.shape[:2] != (query.size(1), query.size(0)):
        raise ValueError(f"indices must be (batch, queries, slots), not {tuple(indices.shape)}")


@torch.library.custom_op("megacpp_overlays::choose_keys", mutates_args=())  # type: ignore[untyped-decorator]
def _choose(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    count: int,
    starts: torch.Tensor,
    ends: torch.Tensor,
    use_relu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return query_blocks.choose(q, weights, k, count, starts, ends, use_relu)


@torch.library.custom_op("megacpp_overlays::chosen_target", mutates_args=())  # type: ignore[untyped-decorator]
def _target(query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor, scale: float) -> torch.Tensor:
    found: torch.Tensor = target_way(query, key).target(query, key, indices, scale)
    return found


@torch.library.custom_op("megacpp_overlays::compare_chosen", mutates_args={"scores"})  # type: ignore[untyped-decorator]
def _compare(scores: torch.Tensor, sums: torch.Tensor, indices: torch.Tensor, smallest: float) -> torch.Tensor:
    kernels = _kernels(scores.device)
    way = kernels if kernels is not None and kernels.takes_rows(scores.size(2)) else in_torch
    found: torch.Tensor = way.compare(scores, sums, indices, smallest)
    return found


@torch.library.custom_op("megacpp_overlays::chosen_gradients", mutates_args=())  # type: ignore[untyped-decorator]
def _gradients(
    grad: torch.Tensor,
    indices: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    use_relu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_q, of_weights, of_k = gradient_way(q, k).gradients(grad, indices, q, weights, k, use_relu)
    return of_q, of_weights, of_k


@_choose.register_fake  # type: ignore[untyped-decorator]
def _(
    q: torch.Tensor,
    _weights: torch.Tensor,
    _k: torch.Tensor,
    count: int,
    _starts: torch.Tensor,
    _ends: torch.Tensor,
    _use_relu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (q.size(1), q.size(0), count)
    return q.new_empty(shape, dtype=torch.int64), q.new_empty(shape, dtype=torch.float32)


@_target.register_fake  # type: ignore[untyped-decorator]
def _(query: torch.Tensor, _key: torch.Tensor, indices: torch.Tensor, _scale: float) -> torch.Tensor:
    return query.new_empty(indices.shape, dtype=torch.float32)


@_compare.register_fake  # type: ignore[untyped-decorator]
def _(scores: torch.Tensor, _sums: torch.Tensor, _indices: torch.Tensor, _smallest: float) -> torch.Tensor:
    return scores.new_empty(scores.shape[:2])


@_gradients.register_fake  # type: ignore[untyped-decorator]
def _(
    _grad: torch.Tensor,
    _indices: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    _use_relu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), weights.new_empty(weights.shape), k.new_empty(k.shape)


def has_kernels(q: torch.Tensor, k: torch.Tensor, query: torch.Tensor, key: torch.Tensor, count: int) -> bool:
    """Return whether kernels compute all four for these: for callers who have another way where they do not."""
    is_chosen = top_k.takes(k.size(0), count) and bool(top_k.has_kernel(q.device))
    return is_chosen and in_torch not in {target_way(query, key), gradient_way(q, k)}


def target_way(query: torch.Tensor, key: torch.Tensor) -> ModuleType:
    """Return the module that computes the target of these."""
    kernels = _kernels(query.device) if query.dtype == key.dtype else None
    return kernels if kernels is not None and kernels.takes_target(query) else in_torch


def gradient_way(q: torch.Tensor, k: torch.Tensor) -> ModuleType:
    """Return the module that computes the gradients of these."""
    kernels = _kernels(q.device) if q.dtype == k.dtype else None
    return kernels if kernels is not None and kernels.takes_gradients(q) else in_torch


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    # Asked for only here: the module needs a Triton that not every torch brings.
    try:
        found = importlib.import_module("megacpp_overlays.kernels.chosen_keys.in_triton")
    except ImportError:
        return None
    return found if found.runs_on(device) else None
