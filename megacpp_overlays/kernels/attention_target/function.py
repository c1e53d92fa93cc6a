"""Attention probabilities summed over heads, the target of DSA's indexer loss, without (batch, heads, queries, keys).

One custom operator, so that CUDA graphs and torch.compile treat it as one step. It has no gradient, because the target is
a constant of the loss. Dtypes, head dimension and device select the implementation, once for each combination:
tensor cores for bfloat16 and float16 on NVIDIA devices, plain PyTorch in blocks for everything else.

Source: section 2.1 of https://github.com/deepseek-ai/DeepSeek-V3.2-Exp/blob/main/DeepSeek_V3_2.pdf
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

from megacpp_overlays.kernels.attention_target import streaming
from megacpp_overlays.kernels.attention_target.validity import validity


def target(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    *,
    starts: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    topk_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the softmax over valid keys, summed over heads; 0 where nothing is valid. Not differentiable.

    Args:
        query: (queries, batch, heads, dim), floating, any strides.
        key: (keys, batch, heads or 1, dim), floating.
        scale: of the products.
        starts: (queries,), integers: a key is valid whose position is not below; this or a mask is needed.
        ends: (queries,), integers: a key is valid whose position is below.
        key_positions: (keys,), integers; None for 0, 1, 2 and so on.
        mask: (queries, keys) or (batch, queries, keys), added to the scores; a key whose entry is not finite is not valid.
        topk_indices: (batch, queries, chosen), integers: only these keys are valid; a negative one is none.

    Returns:
        (batch, queries, keys), float32, contiguous, new.

    Raises:
        ValueError: the shapes do not belong together.
    """
    if (
        (query.ndim, key.ndim) != (4, 4)
        or key.size(1) != query.size(1)
        or key.size(3) != query.size(3)
        or key.size(2) not in {1, query.size(2)}
    ):
        raise ValueError(
            "query and key must be (queries, batch, heads, dim) and (keys, batch, heads or 1, dim), not "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    if topk_indices is not None and (
        topk_indices.ndim != 3 or topk_indices.shape[:2] != (query.size(1), query.size(0))
    ):
        raise ValueError(f"topk_indices must be (batch, queries, chosen), not {tuple(topk_indices.shape)}")
    if mask is not None and mask.ndim == 3 and mask.size(0) not in {1, query.size(1)}:
        raise ValueError(f"mask must be of the batch of the queries, not {tuple(mask.shape)}")
    result: torch.Tensor = _target(query, key, scale, starts, ends, key_positions, mask, topk_indices)
    return result


@torch.library.custom_op("megacpp_overlays::attention_target", mutates_args=())  # type: ignore[untyped-decorator]
def _target(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    key_positions: torch.Tensor | None,
    mask: torch.Tensor | None,
    topk_indices: torch.Tensor | None,
) -> torch.Tensor:
    valid = validity(query.size(0), key.size(0), starts, ends, key_positions, mask, topk_indices)
    way = implementation(query.dtype, key.dtype, query.size(3), query.device)
    found: torch.Tensor = way.target(query, key, scale, valid)
    return found


@_target.register_fake  # type: ignore[untyped-decorator]
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    _scale: float,
    _starts: torch.Tensor | None,
    _ends: torch.Tensor | None,
    _key_positions: torch.Tensor | None,
    _mask: torch.Tensor | None,
    _topk_indices: torch.Tensor | None,
) -> torch.Tensor:
    return query.new_empty((query.size(1), query.size(0), key.size(0)), dtype=torch.float32)


@functools.cache
def implementation(q_dtype: torch.dtype, k_dtype: torch.dtype, dim: int, device: torch.device) -> ModuleType:
    """Return the module that computes: tensor cores where they take these inputs, else blocks in PyTorch."""
    if q_dtype == k_dtype and q_dtype in {torch.bfloat16, torch.float16}:
        # Asked for only here: the module needs a Triton that not every torch brings.
        try:
            tensor_cores = importlib.import_module("megacpp_overlays.kernels.attention_target.in_triton")
        except ImportError:
            return streaming
        if tensor_cores.takes(dim, device):
            return tensor_cores
    return streaming
