"""DSA's indexer loss and its gradient at the index scores, in blocks of queries, given the target.

The loss is the mean over queries of the divergence of the softmax over index scores from the main attention's
probabilities, added up over heads and normalised. Scores and target are (batch, queries, keys) each. No other tensor of that
size is made: the gradient is written over the scores.

Upstream has had two forms. Up to 0.18 logarithms are taken of probabilities plus 1e-10, and the gradient follows that.
Since 0.19 the logarithm is that of the softmax and its gradient is exact; there softmax, normalisation, divergence and
reduction are upstream's own functions, which are given the rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megacpp_overlays.kernels.attention_target import function as attention_target
from megacpp_overlays.kernels.attention_target.blocks import row_blocks
from megacpp_overlays.kernels.attention_target.validity import Validity, validity

_EPSILON = 1e-10
"""The constant that 0.17 and 0.18 add to probabilities."""


class IndexerTarget:
    """The target before normalisation, added up over the heads of all ranks, and its valid keys."""

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, scale: float, group: Any, **valid: torch.Tensor | None
    ) -> None:
        """Compute the target.

        Args:
            query: (queries, batch, heads, dim).
            key: (keys, batch, heads, dim).
            scale: of the products.
            group: the tensor-parallel one, over which heads are spread.
            valid: `mask`, or `starts` and `ends` and `key_positions`, and `topk_indices`: see `attention_target.target`.
        """
        if valid.get("mask") is None and valid.get("starts") is None:
            places = torch.arange(query.size(0), device=query.device)
            valid |= {"starts": torch.zeros_like(places), "ends": places + 1}  # causal
        names = ("starts", "ends", "key_positions", "mask", "topk_indices")
        self.valid: Validity = validity(query.size(0), key.size(0), *(valid.get(name) for name in names))
        self.sums = attention_target.target(query.detach(), key.detach(), scale, **valid)
        if group.size() > 1:
            torch.distributed.all_reduce(self.sums, group=group)

    def valid_rows(self, rows: slice) -> torch.Tensor:
        """Return which keys are valid for some queries: (batch, rows, keys), bool."""
        valid = self.valid.of_rows(rows)
        return valid.expand(self.sums.size(0), -1, -1)

    def blocks(self) -> Any:
        """Return the slices of queries that are worked on one after the other."""
        batch, queries, keys = self.sums.shape
        return row_blocks(queries, batch * keys, self.sums.device.type)


def per_row(target: IndexerTarget, divergence: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """Return the divergence of each row, (batch, queries), from that of the rows of a block, (batch, rows)."""
    parts = [divergence(rows) for rows in target.blocks()]
    return torch.cat(parts, dim=1) if parts else target.sums.new_zeros(target.sums.shape[:2])


# 0.17 and 0.18


def softened_loss(index_scores: torch.Tensor, target: IndexerTarget, coefficient: float) -> torch.Tensor:
    """Return the loss up to 0.18, of scores that are masked but for a support of the target."""

    def divergence(rows: slice) -> torch.Tensor:
        predicted = torch.softmax(_supported(index_scores[:, rows], target, rows), dim=-1, dtype=torch.float32)
        wanted = _shares(target.sums[:, rows])
        terms = wanted.add(_EPSILON).log_().sub_(predicted.add_(_EPSILON).log_()).mul_(wanted)
        return terms.sum(dim=-1)

    return per_row(target, divergence).mean() * coefficient


def softened_gradient(index_scores: torch.Tensor, target: IndexerTarget, grad: torch.Tensor) -> torch.Tensor:
    """Write the gradient of that loss over the scores, which are not masked, and return it.

    Args:
        index_scores: (batch, queries, keys), float32.
        target: causal.
        grad: of the divergence of one row, one number.
    """
    above = grad.view(1, 1, 1)
    for rows in target.blocks():
        valid = target.valid_rows(rows)
        scores = index_scores[:, rows].masked_fill(~valid, float("-inf"))
        predicted = torch.softmax(scores, dim=-1, dtype=torch.float32)
        inner = _shares(target.sums[:, rows]).neg_().div_(predicted + _EPSILON).mul_(above)
        inner.sub_((inner * predicted).sum(dim=-1, keepdim=True))
        index_scores[:, rows] = inner.mul_(predicted).mul_(valid)
    return index_scores


def _supported(scores: torch.Tensor, target: IndexerTarget, rows: slice) -> torch.Tensor:
    if target.valid.allowed is None:
        return scores
    return scores.masked_fill(~target.valid.allowed[:, rows], float("-inf"))


def _shares(sums: torch.Tensor) -> torch.Tensor:
    return sums / sums.sum(dim=-1, keepdim=True)


# Since 0.19


def exact_loss(
    index_scores: torch.Tensor,
    target: IndexerTarget,
    coefficient: float,
    valid_queries: torch.Tensor | None,
    per_token: bool,
    masking: ModuleType,
    divergences: ModuleType,
) -> torch.Tensor:
    """Return the loss since 0.19.

    Args:
        index_scores: (batch, queries, keys), float32.
        target: of the same valid keys.
        coefficient: of the loss.
        valid_queries: (batch, queries), bool; others do not count.
        per_token: whether rows are added up and not averaged.
        masking: upstream's `dsa_masking`.
        divergences: upstream's `dsa_indexer_loss`.
    """

    def divergence(rows: slice) -> torch.Tensor:
        scores = _biased(index_scores, target, rows)
        predicted = masking.masked_log_softmax(scores.float(), target.valid_rows(rows), dim=-1)
        wanted = divergences.normalize_indexer_target(target.sums[:, rows])
        terms: torch.Tensor = divergences.indexer_kl_per_row(wanted, predicted)
        return terms

    found, count = per_row(target, divergence), None
    if valid_queries is not None:
        counted = valid_queries.to(found.dtype)
        found, count = found * counted, counted.sum()
    return (
        divergences.reduce_indexer_kl_sum(
            found.sum(), num_rows=found.numel(), calculate_per_token_loss=per_token, valid_row_count=count
        )
        * coefficient
    )


def exact_gradient(
    index_scores: torch.Tensor,
    target: IndexerTarget,
    grad: torch.Tensor,
    valid_queries: torch.Tensor | None,
    masking: ModuleType,
    divergences: ModuleType,
) -> torch.Tensor:
    """Write the gradient of that loss over the scores and return it.

    Args:
        index_scores: (batch, queries, keys), float32.
        target: of the same valid keys.
        grad: of the divergence of one row, one number.
        valid_queries: (batch, queries), bool; the others' gradient is 0.
        masking: upstream's `dsa_masking`.
        divergences: upstream's `dsa_indexer_loss`.
    """
    above = grad.view(1, 1, 1)
    for rows in target.blocks():
        valid = target.valid_rows(rows)
        scores = _biased(index_scores, target, rows)
        predicted = masking.masked_softmax(scores.float(), valid, dim=-1)
        difference = predicted.sub_(divergences.normalize_indexer_target(target.sums[:, rows])).mul_(above)
        if valid_queries is not None:
            counted = valid_queries[:, rows, None]
            difference.mul_(counted)
            valid = valid & counted
        index_scores[:, rows] = difference.mul_(valid)
    return index_scores


def _biased(index_scores: torch.Tensor, target: IndexerTarget, rows: slice) -> torch.Tensor:
    """Return the scores of some queries, plus the mask if there is one."""
    mask = target.valid.mask_of_rows(rows)
    return index_scores[:, rows] if mask is None else index_scores[:, rows] + mask
