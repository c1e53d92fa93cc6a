"""Fused linear cross entropies that are right without the overlay: means and sums, losses of tokens that nobody learns from, and those
that weigh the same for all tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)
TOKENS, HIDDEN, VOCABULARY = 12, 16, 32
AGAIN = "logits are computed block by block, and summed in another order"


def _learnt(
    reduction: str, *, bias: bool = False, frozen: bool = False, evaluated: bool = False, **options: Any
) -> Mapping[str, object]:
    """Return losses and gradients of hidden states, weights and biases; some tokens are ignored.

    Args:
        reduction: of the losses.
        bias: whether the output layer has one.
        frozen: whether weights learn nothing.
        evaluated: without gradients.
        options: others of the loss.
    """
    import torch

    PACK._loss()  # raises TargetAbsent and Blocked
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).div(4).requires_grad_(not frozen)
    of_classes = torch.randn(VOCABULARY, generator=generator).requires_grad_() if bias else None
    target = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    target[::5] = -100
    loss = _loss(reduction, options)
    with torch.set_grad_enabled(not evaluated):
        found = loss(weight, x, target, *(() if of_classes is None else (of_classes,)))
    losses = found if isinstance(found, tuple) else (found,)
    if not evaluated:
        (losses[0].sum() * 1.5).backward()
    gradients = {
        "hidden states": x.grad,
        "weights": weight.grad,
        "biases": None if of_classes is None else of_classes.grad,
    }
    return {
        **{f"output {number}": each for number, each in enumerate(losses) if each is not None},
        **{f"gradient of {what}": each for what, each in gradients.items() if each is not None},
    }


def _loss(reduction: str, options: Mapping[str, Any]) -> Any:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    return PACK._loss() if reduction == "none" else LigerFusedLinearCrossEntropyLoss(reduction=reduction, **options)


def _neighbour(name: str, reduction: str, *, rounding: float = 0.0, **options: Any) -> Neighbour:
    run = functools.partial(_learnt, reduction, **options)
    why = AGAIN if rounding else ""
    return Neighbour(name=name, overlay="liger-flce-none-backward", run=run, rounding=rounding, why_rounding=why)


NEIGHBOURS = (
    _neighbour("mean-with-bias", "mean", bias=True, label_smoothing=0.1),
    _neighbour("sum-of-frozen-weights", "sum", frozen=True, lse_square_scale=1e-3),
    _neighbour("mean-evaluated", "mean", evaluated=True),
    _neighbour("tokens-that-weigh-alike", "none", rounding=1e-6),
    _neighbour("tokens-evaluated", "none", evaluated=True, rounding=1e-6),
)
