"""Megatron's autograd function of the indexer loss with a sparse loss, in tokens times chosen.

Arguments have upstream's names, order and meaning. A call runs here if it has bounds of keys, if the heads of attention share
their keys, as in absorbed latent attention, and if kernels take its sizes. Every other call goes to upstream's code, and from
there to the seams of its parts. Divergences and the difference of prediction and target, all that a backward pass needs, are
computed for the chosen keys. Checks, layouts, bounds and the reduction are upstream's own functions.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megacpp_overlays.kernels.chosen_keys import function as chosen_keys
from megacpp_overlays.kernels.index_scores import function as index_scores

Function = Callable[..., Any]

_MARK = "_megacpp_overlays_chosen"
"""Attribute of the autograd context of a forward pass that ran here: the numbers that its backward pass needs."""


def forward(original: Function, module: ModuleType) -> Function:
    """Return the forward pass since 0.19, with the functions of `module` for layouts, masks, normalisation and reduction."""

    def carried(
        ctx: Any,
        q: Any,
        weights: Any,
        k: Any,
        query: Any,
        key: Any,
        softmax_scale: Any,
        topk: Any,
        loss_coeff: Any,
        mask: Any,
        sparse_loss: Any,
        pg_collection: Any,
        varlen_starts: Any = None,
        varlen_ends: Any = None,
        key_positions: Any = None,
        query_valid_rows: Any = None,
        calculate_per_token_loss: bool = False,
        use_relu: bool = True,
    ) -> Any:
        count = max(0, min(topk, k.size(0)))
        has_bounds = mask is None and None not in (varlen_starts, varlen_ends) and key_positions is None
        if sparse_loss and has_bounds:
            query, key = (module.dsa_layout.ensure_sbhd(*each)[0] for each in ((query, "query"), (key, "key")))
        if not (
            sparse_loss
            and has_bounds
            and _shares_keys(query, key)
            and index_scores.serves(q, k, query.size(-2))
            and chosen_keys.has_kernels(q, k, query, key, count)
        ):
            return original(
                *(ctx, q, weights, k, query, key, softmax_scale, topk, loss_coeff, mask, sparse_loss, pg_collection),
                *(varlen_starts, varlen_ends, key_positions, query_valid_rows, calculate_per_token_loss, use_relu),
            )
        queries, batch, keys = query.size(0), query.size(1), k.size(0)
        rows = module.dsa_masking.normalize_query_valid_rows(query_valid_rows, b=batch, sq=queries, device=q.device)
        starts, ends, _ = module.dsa_masking.normalize_varlen_bounds(
            mask=None,
            varlen_starts=varlen_starts,
            varlen_ends=varlen_ends,
            key_positions=None,
            sk=keys,
            device=q.device,
        )
        indices, scores = chosen_keys.choose(q, weights, k, count, starts, ends, use_relu)
        sums = chosen_keys.target(query, key[:, :, :1], indices, softmax_scale)
        if pg_collection.tp.size() > 1:  # heads are spread over ranks
            torch.distributed.all_reduce(sums, group=pg_collection.tp)
        loss = _loss(module, indices, scores, sums, rows, calculate_per_token_loss) * loss_coeff
        counted = 1.0 if calculate_per_token_loss else _counted(rows, batch * queries)
        ctx.save_for_backward(q, weights, k, indices, scores)
        setattr(ctx, _MARK, (loss_coeff, counted, use_relu))
        return indices, loss

    return carried


def backward(original: Function, _module: ModuleType) -> Function:
    """Return the backward pass of the calls whose forward pass ran here; all others go to the original."""

    def carried(ctx: Any, grad_topk_indices: Any, grad_loss: Any) -> Any:
        if not hasattr(ctx, _MARK):
            return original(ctx, grad_topk_indices, grad_loss)
        q, weights, k, indices, difference = ctx.saved_tensors
        loss_coeff, counted, use_relu = getattr(ctx, _MARK)
        grad = difference * (grad_loss * loss_coeff / counted)
        return (
            *chosen_keys.gradients(grad, indices, q, weights, k, use_relu),
            *(None,) * (len(ctx.needs_input_grad) - 3),
        )

    return carried


def _shares_keys(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Return whether all heads of attention have the same keys in memory."""
    return bool(key.size(2) == 1 or (key.size(2) == query.size(2) and key.stride(2) == 0))


def _counted(rows: torch.Tensor | None, every: int) -> torch.Tensor | float:
    """Return how many queries the loss is a mean over."""
    return float(max(1, every)) if rows is None else rows.sum().float().clamp_min(1.0)


def _loss(
    module: ModuleType,
    indices: torch.Tensor,
    scores: torch.Tensor,
    sums: torch.Tensor,
    counted: torch.Tensor | None,
    per_token: bool,
) -> torch.Tensor:
    """Return the loss; write the difference of prediction and target, 0 where no key is, over the scores.

    Args:
        module: upstream's, with `dsa_indexer_loss`.
        indices: (batch, queries, slots), -1 where no key is.
        scores: of the slots.
        sums: the target of the slots, summed over heads.
        counted: (batch, queries), bool: which queries count.
        per_token: whether rows are added up and not averaged.
    """
    divergences, number = module.dsa_indexer_loss, None
    found = chosen_keys.compare(scores, sums, indices, divergences.INDEXER_LOSS_EPS)
    if counted is not None:
        scores.mul_(counted.unsqueeze(-1))
        found, number = found * counted, counted.sum().float()
    loss: torch.Tensor = divergences.reduce_indexer_kl_sum(
        found.sum(), num_rows=found.numel(), calculate_per_token_loss=per_token, valid_row_count=number
    )
    return loss
