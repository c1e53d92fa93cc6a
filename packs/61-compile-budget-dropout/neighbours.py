"""Compiled models whose gradients are right without the overlay: all is saved, nothing is drawn, or a region is checkpointed by the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)


def _plain(rows: Any, weight: Any) -> Any:
    return ((rows @ weight).sin() @ weight).cos()


def _attention(rows: Any, weight: Any) -> Any:
    """Attention without dropout: a random operation that draws nothing."""
    import torch

    heads = (rows @ weight).view(1, PACK.ROWS, 4, 16).transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).sin()


def _checkpointed(rows: Any, weight: Any) -> Any:
    """A region that keeps its random state."""
    from torch.utils.checkpoint import checkpoint

    return checkpoint(PACK._dropout, rows, weight, use_reentrant=False)


def _measured(function: Callable[[Any, Any], Any], budget: float) -> Mapping[str, list[float]]:
    """Return output, gradients, and how many numbers are saved for the backward pass."""
    import torch

    rows, weight = PACK.inputs()
    saved: list[int] = []

    def note(tensor: Any) -> Any:
        saved.append(tensor.numel())
        return tensor

    with PACK.compiling(budget), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = torch.compile(function, backend="aot_eager")(rows, weight)
    output.sum().backward()
    found = {"output": output, "rows": rows.grad, "weight": weight.grad}
    return {
        **{name: value.detach().flatten().tolist() for name, value in found.items()},
        "saved": sorted(map(float, saved)),
    }


ASKED: Mapping[str, tuple[Callable[..., Any], float]] = {
    "everything-is-saved": (PACK._dropout, 1.0),
    "nothing-is-drawn": (_plain, 0.5),
    "nothing-is-drawn-nor-saved": (_plain, 0.0),
    "attention-without-dropout": (_attention, 0.0),
    "attention-without-dropout-half": (_attention, 0.5),
    "checkpointed-by-the-model": (_checkpointed, 1.0),
}
NEIGHBOURS = tuple(
    Neighbour(name=name, overlay=PACK.OVERLAY, run=functools.partial(_measured, *asked))
    for name, asked in ASKED.items()
)
