"""Losses and gradients of Liger's fused linear cross entropy, which are right without the overlay: it saves products, and changes no number
by more than rounding."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, TargetAbsent, beside

PACK = beside(__file__)
TOKENS, HIDDEN, VOCABULARY = 24, 16, 16
IGNORED = -100


def _computed(
    labelled: float,
    *,
    dtype: str = "float32",
    biased: bool = False,
    frozen: bool = False,
    learns: bool = True,
    **settings: Any,
) -> Mapping[str, object]:
    """Return what a loss returns, and its gradients.

    Args:
        labelled: the share of tokens with a label.
        dtype: of states and weight.
        biased: whether the output layer has a bias.
        frozen: whether the output layer is not trained.
        learns: whether there are gradients.
        settings: of the loss.
    """
    import torch

    kind = type(PACK._loss())
    if unknown := settings.keys() - inspect.signature(kind).parameters.keys():
        raise TargetAbsent(f"the loss of this release has no {', '.join(sorted(unknown))}")
    generator = torch.Generator().manual_seed(46)
    own = getattr(torch, dtype)
    states = torch.randn(TOKENS, HIDDEN, generator=generator).to(own).requires_grad_()
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=generator) / HIDDEN**0.5).to(own).requires_grad_(not frozen)
    bias = torch.randn(VOCABULARY, generator=generator).to(own).requires_grad_(not frozen) if biased else None
    with torch.no_grad():
        highest = (states @ weight.t()).argmax(-1)
    others = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels = torch.where(torch.arange(TOKENS) % 2 == 0, highest, others)
    labels[torch.rand(TOKENS, generator=generator) >= labelled] = IGNORED
    with torch.set_grad_enabled(learns):
        found = kind(**settings)(weight, states, labels, bias)
    names = ("loss", "z_loss", "token_accuracy", "predicted_tokens")
    outputs = {name: getattr(found, name, None) for name in names} if hasattr(found, "z_loss") else {"loss": found}
    known = {name: each for name, each in outputs.items() if each is not None}
    if not learns:
        return known
    slope = torch.randn(known["loss"].shape, generator=generator)
    (known["loss"] * slope).sum().backward()
    learnt = {"states": states.grad, "weight": weight.grad, "bias": None if bias is None else bias.grad}
    return {**known, **{f"gradient of {name}": each for name, each in learnt.items() if each is not None}}


def _neighbour(name: str, labelled: float, *, rounding: float = 0.0, **asked: Any) -> Neighbour:
    return Neighbour(
        name=name,
        overlay="liger-flce-labelled",
        run=functools.partial(_computed, labelled, **asked),
        rounding=rounding,
        why_rounding="labelled tokens alone are added up, in one product" if rounding else "",
    )


FLOAT, HALF = 1e-6, 1e-2
NEIGHBOURS = (
    _neighbour("all-labelled", 1.0, rounding=FLOAT),
    _neighbour("all-labelled-bfloat16", 1.0, rounding=HALF, dtype="bfloat16", biased=True),
    _neighbour("per-token-frozen", 0.3, rounding=FLOAT, reduction="none", frozen=True),
    _neighbour(
        "sum-smoothed-with-z-loss",
        0.3,
        rounding=FLOAT,
        reduction="sum",
        biased=True,
        label_smoothing=0.1,
        lse_square_scale=1e-2,
        return_z_loss=True,
    ),
    _neighbour("no-gradients", 0.3, rounding=FLOAT, learns=False, return_token_accuracy=True),
    _neighbour("token-scaling", 0.3, rounding=FLOAT, use_token_scaling=True),
    _neighbour("predicted-tokens", 0.3, return_predicted_tokens=True),
    _neighbour("no-labels", 0.0),
)
