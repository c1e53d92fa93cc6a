"""The positions of the k largest numbers of each row: a set, in the order of positions, defined where numbers are equal.

`torch.topk` sorts the chosen numbers, and does not define which of several equal numbers it takes. Attention over chosen keys
needs neither the order nor the numbers, so here nothing is sorted, and of equal numbers the first ones are taken.

One custom operator, so that CUDA graphs and torch.compile treat it as one step. The implementation depends on the dtype, the
length of a row, how many are chosen, and the device, which is examined once: a kernel that reads every row once on NVIDIA
devices of capability 9, sorting in PyTorch for everything else.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

from megacpp_overlays.kernels.top_k import in_torch
from megacpp_overlays.runtime import dynamo

LONGEST = 32768
"""Numbers of a row that a program takes, 512 threads 64 each; of longer rows it chooses stretch by stretch."""
MOST_OF_LONG_ROWS = LONGEST // 2
"""Most values that the kernel chooses of a longer row: the choices of two stretches have to fit into one."""


def choose(scores: torch.Tensor, k: int, *, mark_infinite: bool = False) -> torch.Tensor:
    """Return where the k largest numbers of each row are, in ascending order.

    A NaN counts as infinity, -0.0 and 0.0 are equal, and of equal numbers the first ones are chosen. The same scores always
    give the same positions. Not differentiable.

    Args:
        scores: (..., keys), real numbers, any strides.
        k: how many are chosen, from 0 to keys.
        mark_infinite: -1 instead of positions whose score is negative infinity, after all others.

    Returns:
        (..., k), int64, contiguous, new.

    Raises:
        ValueError: a row has fewer numbers, or scores are not such numbers.
    """
    if scores.ndim == 0 or scores.is_complex() or scores.dtype == torch.bool:
        raise ValueError(f"scores must be (..., keys) of real numbers, not {scores.dtype} of {tuple(scores.shape)}")
    if not 0 <= k <= scores.size(-1):
        raise ValueError(f"k must be from 0 to the {scores.size(-1)} numbers of a row, not {k}")
    result: torch.Tensor = _choose(scores, k, mark_infinite)
    return result


@torch.library.custom_op("megacpp_overlays::top_k", mutates_args=())  # type: ignore[untyped-decorator]
def _choose(scores: torch.Tensor, k: int, mark_infinite: bool) -> torch.Tensor:
    if k == 0 or scores.numel() == 0:
        return torch.empty((*scores.shape[:-1], k), dtype=torch.int64, device=scores.device)
    found: torch.Tensor = implementation(scores.dtype, scores.size(-1), k, scores.device).choose(
        scores, k, mark_infinite
    )
    return found


@_choose.register_fake  # type: ignore[untyped-decorator]
def _(scores: torch.Tensor, k: int, _mark_infinite: bool) -> torch.Tensor:
    return scores.new_empty((*scores.shape[:-1], k), dtype=torch.int64)


def implementation(dtype: torch.dtype, keys: int, k: int, device: torch.device) -> ModuleType:
    """Return the module that computes: a kernel where it takes these rows, else PyTorch."""
    if dtype in {torch.float32, torch.bfloat16, torch.float16} and takes(keys, k):
        return _of_device(device)
    return in_torch


def takes(keys: int, k: int) -> bool:
    """Return whether the kernel, where there is one, chooses so many of so many."""
    return keys <= LONGEST or k <= MOST_OF_LONG_ROWS


@dynamo.constant
def has_kernel(device: torch.device) -> bool:
    """Return whether rows that the kernel takes go to it on a device, and are not sorted there.

    For callers who would rather leave them to `torch.topk`. torch.compile takes the answer for a constant.
    """
    return _of_device(device) is not in_torch


@functools.cache
def _of_device(device: torch.device) -> ModuleType:
    # Asked for only here: the module needs a Triton that not every torch brings.
    try:
        kernel = importlib.import_module("megacpp_overlays.kernels.top_k.in_triton")
    except ImportError:
        return in_torch
    return kernel if kernel.takes(device) else in_torch
