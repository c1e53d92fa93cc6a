"""The numbers of each token that the passes of `vocabulary_softmax` take and give."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Statistics(NamedTuple):
    """Running numbers of every token, (tokens,) each, in the dtype of the arithmetic."""

    maximum: torch.Tensor
    """The highest logit."""
    accumulate: torch.Tensor
    """The sum of exp(logit - highest)."""
    label_logit: torch.Tensor
    """The logit of the token's own class; 0 until its block came by."""
    spread_logits: torch.Tensor | None = None
    """The sum of all logits, weighted by class where classes have weights; for label smoothing alone."""

    @property
    def lse(self) -> torch.Tensor:
        """The log of the sum of exp(logits)."""
        return self.maximum + self.accumulate.log()


OF_OTHERS = (0.0, 1.0, 0.0, 0.0)
"""Statistics of tokens that are not selected: finite, and so is all that follows from them."""


class Coefficients(NamedTuple):
    """Coefficients of the gradient of a token's logits, (tokens,) each, in the dtype of the arithmetic."""

    lse: torch.Tensor
    of_probability: torch.Tensor
    """Factor of exp(logit - lse)."""
    of_label: torch.Tensor
    """Subtracted at the token's own class."""
    of_spread: torch.Tensor | None = None
    """Subtracted at every class, times the weight of the class; for label smoothing alone."""

    @property
    def alive(self) -> torch.Tensor:
        """Whether a token has a gradient, (tokens,), bool."""
        alive = (self.of_probability != 0) | (self.of_label != 0)
        return alive if self.of_spread is None else alive | (self.of_spread != 0)
