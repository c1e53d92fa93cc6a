"""Megatron's functions of the fused indexer loss, forward and backward, computed with `IndexerTarget`.

Arguments have upstream's names, order and meaning: `softened_` as in 0.17 and 0.18, `exact_` since 0.19. In main and dev
(`_external_mass`) the caller may pass the denominator; such calls go to upstream's function or to `traced`. `scores` computes
the index scores and is called like upstream's function of that release.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megacpp_overlays.kernels import measured
from megacpp_overlays.kernels.attention_target import indexer_loss
from megacpp_overlays.kernels.attention_target.indexer_loss import IndexerTarget
from megacpp_overlays.kernels.index_scores import function as index_scores_function

Function = Callable[..., Any]

_KERNEL_DTYPES = frozenset({torch.bfloat16, torch.float16})


def _recorded(*tensors: torch.Tensor) -> bool:
    """Return whether autograd records operations on these tensors. It can differentiate upstream's code, not the kernels."""
    return torch.is_grad_enabled() and any(each.requires_grad for each in tensors)


def _serves(index_scores: torch.Tensor, query: torch.Tensor) -> bool:
    """Return whether a loss is computed here and not by upstream's function, which builds (batch, heads, queries, keys)."""
    return measured.serves(query, _KERNEL_DTYPES, index_scores.numel() * query.size(-2))


def softened_loss(original: Function) -> Function:
    """Return the loss of 0.17 and 0.18. Calls that autograd records go to the original."""

    def loss(
        index_scores: Any,
        topk_indices: Any,
        query: Any,
        key: Any,
        softmax_scale: float,
        loss_coeff: float,
        sparse_loss: bool,
        pg_collection: Any,
    ) -> Any:
        if _recorded(index_scores, query, key) or not _serves(index_scores, query):
            return original(
                index_scores, topk_indices, query, key, softmax_scale, loss_coeff, sparse_loss, pg_collection
            )
        support = topk_indices if sparse_loss else None
        target = IndexerTarget(query, key, softmax_scale, pg_collection.tp, topk_indices=support)
        return indexer_loss.softened_loss(index_scores, target, loss_coeff)

    return loss


def softened_backward(original: Function, scores: Function) -> Function:
    """Return the backward of that loss: gradients of queries, weights and keys; the original's for small tensors, see `measured`."""

    def backward(
        q: Any,
        weights: Any,
        k: Any,
        query: Any,
        key: Any,
        topk_indices: Any,
        softmax_scale: float,
        loss_coeff: float,
        sparse_loss: bool,
        grad_loss: Any,
        pg_collection: Any,
    ) -> Any:
        if not index_scores_function.serves(q, k, query.size(-2)):
            return original(
                *(q, weights, k, query, key, topk_indices, softmax_scale, loss_coeff, sparse_loss),
                *(grad_loss, pg_collection),
            )
        support = topk_indices if sparse_loss else None
        target = IndexerTarget(query, key, softmax_scale, pg_collection.tp, topk_indices=support)
        of_a_row = grad_loss * loss_coeff / (query.size(0) * query.size(1))
        grad = indexer_loss.softened_gradient(scores(q, weights, k), target, of_a_row)
        del target
        return index_scores_function.gradients(grad, q, weights, k)

    return backward


def exact_loss(original: Function, module: ModuleType) -> Function:
    """Return the loss since 0.19, with the functions of `module` for masks, normalisation and reduction."""

    def loss(
        index_scores: Any,
        topk_indices: Any,
        query: Any,
        key: Any,
        softmax_scale: float,
        loss_coeff: float,
        sparse_loss: bool,
        pg_collection: Any,
        mask: Any = None,
        varlen_starts: Any = None,
        varlen_ends: Any = None,
        key_positions: Any = None,
        query_valid_rows: Any = None,
        calculate_per_token_loss: bool = False,
    ) -> Any:
        valid = (mask, varlen_starts, varlen_ends, key_positions)
        if _recorded(index_scores, query, key) or not _serves(index_scores, query):
            return original(
                *(index_scores, topk_indices, query, key, softmax_scale, loss_coeff, sparse_loss, pg_collection),
                *(*valid, query_valid_rows, calculate_per_token_loss),
            )
        target, rows = _exact_target(
            module,
            query,
            key,
            softmax_scale,
            pg_collection,
            topk_indices if sparse_loss else None,
            valid,
            query_valid_rows,
        )
        return indexer_loss.exact_loss(
            index_scores,
            target,
            loss_coeff,
            rows,
            calculate_per_token_loss,
            module.dsa_masking,
            module.dsa_indexer_loss,
        )

    return loss


def exact_backward(original: Function, module: ModuleType, scores: Function) -> Function:
    """Return the backward of that loss; the original's for small tensors, see `measured`."""

    def backward(
        q: Any,
        weights: Any,
        k: Any,
        query: Any,
        key: Any,
        topk_indices: Any,
        softmax_scale: float,
        loss_coeff: float,
        sparse_loss: bool,
        mask: Any,
        grad_loss: Any,
        pg_collection: Any,
        varlen_starts: Any = None,
        varlen_ends: Any = None,
        key_positions: Any = None,
        query_valid_rows: Any = None,
        calculate_per_token_loss: bool = False,
        use_relu: bool = True,
    ) -> Any:
        valid = (mask, varlen_starts, varlen_ends, key_positions)
        if not index_scores_function.serves(q, k, query.size(-2)):
            return original(
                *(q, weights, k, query, key, topk_indices, softmax_scale, loss_coeff, sparse_loss, mask, grad_loss),
                *(pg_collection, *valid[1:], query_valid_rows, calculate_per_token_loss, use_relu),
            )
        target, rows = _exact_target(
            module,
            query,
            key,
            softmax_scale,
            pg_collection,
            topk_indices if sparse_loss else None,
            valid,
            query_valid_rows,
        )
        of_a_row = grad_loss * loss_coeff
        if not calculate_per_token_loss:
            of_a_row = of_a_row / (
                max(1, target.sums.size(0) * target.sums.size(1)) if rows is None else rows.sum().float().clamp_min(1.0)
            )
        found = scores(q, weights, k, use_relu=use_relu)
        grad = indexer_loss.exact_gradient(found, target, of_a_row, rows, module.dsa_masking, module.dsa_indexer_loss)
        del target
        return index_scores_function.gradients(grad, q, weights, k, use_relu=use_relu)

    return backward


def _exact_target(
    module: ModuleType,
    query: Any,
    key: Any,
    scale: float,
    pg_collection: Any,
    support: Any,
    valid: tuple[Any, Any, Any, Any],
    query_valid_rows: Any,
) -> tuple[Any, Any]:
    """Return the target, and which queries count, (batch, queries) or None; upstream's own checks come first."""
    query, key = (module.dsa_layout.ensure_sbhd(*each)[0] for each in ((query, "query"), (key, "key")))
    queries, batch, keys, device = query.size(0), query.size(1), key.size(0), query.device
    rows = module.dsa_masking.normalize_query_valid_rows(query_valid_rows, b=batch, sq=queries, device=device)
    mask, *bounds = valid
    starts, ends, positions = module.dsa_masking.normalize_varlen_bounds(
        mask=mask, varlen_starts=bounds[0], varlen_ends=bounds[1], key_positions=bounds[2], sk=keys, device=device
    )
    if mask is not None:
        module.dsa_masking.prepare_additive_mask(mask, sq=queries, sk=keys, b=batch, device=device)
    # Positions that upstream made, 0 to keys, need no look at each key.
    positions = None if bounds[2] is None else positions
    return (
        IndexerTarget(
            query, key, scale, pg_collection.tp,
            mask=mask, starts=starts, ends=ends, key_positions=positions, topk_indices=support,
        ),
        rows,
    )  # fmt: skip


def exact_loss_external_mass(original: Function, module: ModuleType) -> Function:
    """Return the loss of main and dev; with a denominator from elsewhere the original computes it."""
    ours = exact_loss(original, module)

    def loss(
        index_scores: Any,
        topk_indices: Any,
        query: Any,
        key: Any,
        softmax_scale: float,
        loss_coeff: float,
        sparse_loss: bool,
        pg_collection: Any,
        mask: Any = None,
        varlen_starts: Any = None,
        varlen_ends: Any = None,
        key_positions: Any = None,
        query_valid_rows: Any = None,
        calculate_per_token_loss: bool = False,
        non_compressed_lse: Any = None,
    ) -> Any:
        given = (
            *(index_scores, topk_indices, query, key, softmax_scale, loss_coeff, sparse_loss, pg_collection, mask),
            *(varlen_starts, varlen_ends, key_positions, query_valid_rows, calculate_per_token_loss),
        )
        return ours(*given) if non_compressed_lse is None else original(*given, non_compressed_lse)

    return loss


def exact_backward_external_mass(
    original: Function, module: ModuleType, scores: Function, traced: Function
) -> Function:
    """Return the backward of main and dev; with a denominator from elsewhere `traced` computes it."""
    ours = exact_backward(original, module, scores)

    def backward(
        q: Any,
        weights: Any,
        k: Any,
        query: Any,
        key: Any,
        topk_indices: Any,
        softmax_scale: float,
        loss_coeff: float,
        sparse_loss: bool,
        mask: Any,
        grad_loss: Any,
        pg_collection: Any,
        varlen_starts: Any = None,
        varlen_ends: Any = None,
        key_positions: Any = None,
        query_valid_rows: Any = None,
        calculate_per_token_loss: bool = False,
        use_relu: bool = True,
        non_compressed_lse: Any = None,
    ) -> Any:
        given = (
            *(q, weights, k, query, key, topk_indices, softmax_scale, loss_coeff, sparse_loss, mask, grad_loss),
            *(pg_collection, varlen_starts, varlen_ends, key_positions, query_valid_rows),
            *(calculate_per_token_loss, use_relu),
        )
        return ours(*given) if non_compressed_lse is None else traced(*given, non_compressed_lse)

    return backward
