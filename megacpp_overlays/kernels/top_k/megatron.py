"""Megatron's `fused_qk_topk_naive` with this top-k: scores and masks by upstream's own functions, then the choice.

`scores` computes the index scores as upstream's function of that release is called. Keys that the kernel does not take go
to upstream's function, whose top-k is faster than sorting. Where scores of all keys are more than a block of `chosen_keys`, and no
gradient goes through them, keys are chosen a block of queries at a time, and the scores that are returned are computed when they
are read: attention without an indexer loss, as in evaluation, never does.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megacpp_overlays.kernels.chosen_keys import function as chosen_keys
from megacpp_overlays.kernels.chosen_keys import query_blocks
from megacpp_overlays.kernels.top_k import function as top_k
from megacpp_overlays.kernels.top_k.deferred_scores import DeferredScores

Function = Callable[..., Any]


def chosen(original: Function, scores: Function) -> Function:
    """Return the function of 0.17 and 0.18: a mask at most, and every position is written."""

    def function(q: Any, k: Any, weights: Any, index_topk: int, mask: Any = None) -> Any:
        if not _chooses(k, index_topk):
            return original(q, k, weights, index_topk, mask)
        found = scores(q, weights, k)
        if mask is not None:
            found = _masked(found, mask)
        return found, top_k.choose(found, min(index_topk, q.size(0)))

    return function


def chosen_and_marked(original: Function, masking: ModuleType, scores: Function) -> Function:
    """Return the function since 0.19: bounds of keys, and -1 where the score is infinite."""

    def function(
        q: Any,
        k: Any,
        weights: Any,
        index_topk: int,
        mask: Any = None,
        varlen_starts: Any = None,
        varlen_ends: Any = None,
        key_positions: Any = None,
        use_relu: bool = True,
    ) -> Any:
        bounds = (varlen_starts, varlen_ends, key_positions)
        if not _chooses(k, index_topk):
            return original(q, k, weights, index_topk, mask, *bounds, use_relu)
        keys = k.size(0)
        count = max(0, min(index_topk, keys))
        starts, ends, positions = masking.normalize_varlen_bounds(
            mask=mask, varlen_starts=bounds[0], varlen_ends=bounds[1], key_positions=bounds[2],
            sk=keys, device=k.device,
        )  # fmt: skip

        def all_scores() -> torch.Tensor:
            found: torch.Tensor = scores(q, weights, k, use_relu=use_relu)
            if starts is not None:
                found = masking.apply_starts_ends_mask_to_scores(found, starts, ends, positions)
            return found if mask is None or starts is not None else _masked(found, mask)

        if starts is not None and key_positions is None and _defers(q, weights, k):
            indices, _ = chosen_keys.choose(q, weights, k, count, starts, ends, use_relu)
            return DeferredScores((q.size(1), q.size(0), keys), q.device, all_scores), indices
        found = all_scores()
        return found, top_k.choose(found, count, mark_infinite=True)

    return function


def _defers(q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor) -> bool:
    """Return whether keys are chosen in blocks, and scores of all keys computed only when they are read."""
    learns = torch.is_grad_enabled() and any(each.requires_grad for each in (q, weights, k))
    is_large = not query_blocks.is_one_block(q.size(0), q.size(1) * k.size(0), q.device.type)
    return is_large and not learns and not torch.compiler.is_compiling()


def _chooses(keys: torch.Tensor, k: int) -> bool:
    return top_k.takes(keys.size(0), k) and bool(top_k.has_kernel(keys.device))


def _masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype != scores.dtype:
        raise AssertionError(f"the mask must have the dtype of the scores, {scores.dtype}, not {mask.dtype}")
    return scores + mask
