"""Input batch of a rehearsal, and its losses and gradients in float64, computed from the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megacpp_overlays.kernels.linear_cross_entropy.reference import token_losses

IGNORE_INDEX = -7
"""Not upstream's default of -100, so that a function that drops the argument gets another loss."""


class Batch(NamedTuple):
    """Inputs of a linear cross entropy over 6 tokens of hidden size 4 and 5 classes, on the CPU."""

    hidden: torch.Tensor
    """(6, 4), float32."""
    weight: torch.Tensor
    """(5, 4), float32."""
    labels: torch.Tensor
    """(6,), int64; one is `IGNORE_INDEX`."""
    token_gradients: torch.Tensor
    """(6,), float32: gradient of each token's loss."""

    def arriving(self, reduction: str) -> torch.Tensor:
        """Return the gradient of the loss, float32: (6,) for "none", without dimensions otherwise."""
        return self.token_gradients if reduction == "none" else self.token_gradients[3]


class Results(NamedTuple):
    """Loss and gradients, in the shapes of `Batch`."""

    loss: torch.Tensor
    """(6,) for "none", without dimensions otherwise."""
    hidden_gradient: torch.Tensor
    weight_gradient: torch.Tensor


def batch() -> Batch:
    """Return the inputs. They are multiples of 1/16, so float32 products of them are exact."""
    return Batch(
        hidden=(torch.arange(24.0, dtype=torch.float32, device="cpu").view(6, 4) - 11) / 8,
        weight=(torch.arange(20.0, dtype=torch.float32, device="cpu").view(5, 4).flip(0) - 7) / 16,
        labels=torch.tensor([0, 4, IGNORE_INDEX, 2, 2, 1], device="cpu"),
        token_gradients=torch.tensor([1.0, -2.0, 3.0, 0.5, 4.0, 0.25], dtype=torch.float32, device="cpu"),
    )


def expected(inputs: Batch, reduction: str) -> Results:
    """Return the results for a batch, float64.

    The gradients are written out: autograd's first backward pass starts a thread for each GPU (`rehearsal`).
    """
    hidden, weight = inputs.hidden.double(), inputs.weight.double()
    counted = (inputs.labels != IGNORE_INDEX).to(torch.float64)
    divisor = counted.sum() if reduction == "mean" else 1.0
    losses, _ = token_losses(hidden, weight, inputs.labels, ignore_index=IGNORE_INDEX)
    probabilities = torch.softmax(hidden @ weight.t(), dim=1)
    one_hot = torch.nn.functional.one_hot(inputs.labels.clamp(min=0), weight.shape[0]).double()
    scale = counted * inputs.arriving(reduction).double() / divisor
    logits_gradient = (probabilities - one_hot) * scale.unsqueeze(1)
    return Results(
        loss=losses if reduction == "none" else losses.sum() / divisor,
        hidden_gradient=logits_gradient @ weight,
        weight_gradient=logits_gradient.t() @ hidden,
    )
