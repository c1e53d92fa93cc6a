"""Accumulation of a shard's gradients, a block of logits at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megacpp_overlays.kernels.linear_cross_entropy.panel_path import PanelPath
from megacpp_overlays.kernels.linear_cross_entropy.shard import GradientRequest, Shard
from megacpp_overlays.kernels.masked_products.products import PanelProducts, Products


class PanelSums(NamedTuple):
    """Functions that add the gradients of one group of panels to the sums."""

    bias: Callable[[int], None]
    weight: Callable[[int], None]
    hidden: Callable[[int], None]


class GradientSums:
    """The gradients, summed over the blocks so far."""

    def __init__(
        self,
        hidden: torch.Tensor,
        shard: Shard,
        wanted: GradientRequest,
        products: Products,
        *,
        order: torch.Tensor | None,
        one_block: bool,
        overwrite: bool,
    ) -> None:
        self.of_hidden: torch.Tensor | None = None
        self.of_weight = torch.empty_like(shard.weight) if wanted.weight and wanted.main_grad is None else None
        self.of_bias = torch.empty_like(shard.bias) if wanted.bias and shard.bias is not None else None
        self._hidden, self._wanted, self._products, self._order = hidden, wanted, products, order
        self._dtype = wanted.hidden_dtype if one_block else _wider(hidden.dtype)
        self._overwrite = one_block and overwrite

    def add_bias(self, rows: slice, gradient: torch.Tensor) -> None:
        """Sum the gradient of a block's logits over tokens, if that is wanted."""
        if self.of_bias is not None:
            self._products.sum_rows(gradient, out=self.of_bias[rows])

    def add_weight(self, rows: slice, gradient: torch.Tensor) -> None:
        """Write or add the weight gradient of a block, if that is wanted."""
        if self._wanted.main_grad is not None:
            out = self._wanted.main_grad[rows]
            self._products.over_rows(gradient, self._hidden, out=out, add=True, order=self._order)
        elif self.of_weight is not None:
            self._products.over_rows(gradient, self._hidden, out=self.of_weight[rows], order=self._order)

    def add_hidden(self, gradient: torch.Tensor, weight: torch.Tensor) -> None:
        """Add a block's share of the hidden states' gradient, if that is wanted; the first block writes it."""
        if not self._wanted.hidden:
            return
        add = self.of_hidden is not None
        if self.of_hidden is None:
            self.of_hidden = self._room()
        self._products.of_rows(gradient, weight, out=self.of_hidden, add=add)

    def of_panels(
        self, path: PanelPath, products: PanelProducts, gradient: torch.Tensor, weight: torch.Tensor, *, begun: bool
    ) -> PanelSums:
        """Return the functions that add one group of panels, of the shard's first classes; the first group comes first.

        Without `begun` the first group writes the gradient of the hidden states, into its tensor if there is one already.
        """
        classes, found = slice(0, products.panels.classes), PanelSums(_nothing, _nothing, _nothing)
        if self.of_bias is not None:
            found = found._replace(bias=products.sum_rows(gradient, out=self.of_bias[classes]))
        adds = self._wanted.main_grad is not None
        out = self._wanted.main_grad if adds else self.of_weight
        if out is not None:
            of_weight = products.over_rows(gradient, path.hidden, out=out[classes], add=adds, order=path.order)
            found = found._replace(weight=of_weight)
        if self._wanted.hidden:
            room = self.of_hidden = self._room() if self.of_hidden is None else self.of_hidden
            first, later = (products.across(gradient, weight, out=room, add=add) for add in (begun, True))
            found = found._replace(hidden=lambda group: later(group) if group else first(group))
        return found

    def _room(self) -> torch.Tensor:
        if self._overwrite:
            return self._hidden
        room: torch.Tensor = torch.empty(self._hidden.shape, dtype=self._dtype, device=self._hidden.device)
        return room


def _nothing(_group: int) -> None:
    """Do nothing: this gradient is not wanted."""


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
