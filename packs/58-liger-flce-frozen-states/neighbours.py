"""Fused linear cross entropies that are right without the overlay: hidden states that learn, layers that do not, evaluation, and losses of each token."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)


def _learnt(
    entry: str,
    reduction: str = "mean",
    *,
    states: bool = False,
    layer: bool = True,
    bias: bool = False,
    evaluated: bool = False,
) -> Mapping[str, object]:
    """Return losses and gradients.

    Args:
        entry: `module` or `function`.
        reduction: of the losses.
        states: whether hidden states want a gradient.
        layer: whether weights and biases do.
        bias: whether there are biases.
        evaluated: without gradients.
    """
    import torch

    loss = PACK.losses(entry, reduction)
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(PACK.SMALL.tokens, PACK.SMALL.hidden, generator=generator).requires_grad_(states)
    weight = torch.randn(PACK.SMALL.vocabulary, PACK.SMALL.hidden, generator=generator).div(4).requires_grad_(layer)
    biases = [torch.randn(PACK.SMALL.vocabulary, generator=generator).requires_grad_(layer)] if bias else []
    target = torch.randint(PACK.SMALL.vocabulary, (PACK.SMALL.tokens,), generator=generator)
    target[::5] = -100
    with torch.set_grad_enabled(not evaluated):
        found = loss(x, target, weight, *biases)
    if found.requires_grad:
        (found.sum() * PACK.SCALE).backward()
    learnt = {
        f"gradient {number}": each.grad for number, each in enumerate((x, weight, *biases)) if each.grad is not None
    }
    return {"loss": found, "needs a gradient": float(found.requires_grad), **learnt}


_of = functools.partial(Neighbour, overlay=PACK.OVERLAY)
NEIGHBOURS = (
    _of(name="states-that-learn", run=functools.partial(_learnt, "function", states=True, bias=True)),
    _of(name="states-that-learn-in-a-module", run=functools.partial(_learnt, "module", "sum", states=True, bias=True)),
    _of(name="layer-that-does-not-learn", run=functools.partial(_learnt, "function", states=True, layer=False)),
    _of(name="nothing-learns", run=functools.partial(_learnt, "module", layer=False)),
    _of(name="evaluated", run=functools.partial(_learnt, "function", evaluated=True)),
    _of(name="evaluated-in-a-module", run=functools.partial(_learnt, "module", evaluated=True)),
    _of(name="losses-of-tokens", run=functools.partial(_learnt, "function", "none", states=True)),
)
