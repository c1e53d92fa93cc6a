"""Inputs of a linear cross entropy, the results of float64 autograd of its reference, and the results of the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megacpp_overlays.kernels.linear_cross_entropy import linear_cross_entropy, reference

IGNORED = -100
ARRIVES = ("strided", "expanded", "zero first", "zero", "NaN at an ignored token")


@dataclass
class Inputs:
    """One call. Where `tests` says strided, no tensor but the target is contiguous."""

    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    arriving: torch.Tensor
    """(tokens,) for "none", without dimensions otherwise."""
    bias: torch.Tensor | None = None
    class_weight: torch.Tensor | None = None
    reduction: str = "none"
    terms: dict[str, Any] = field(default_factory=dict)
    """ignore_index, label_smoothing, softcap, lse_square_scale."""

    @property
    def alive(self) -> torch.Tensor:
        return self.target.reshape(-1) != self.terms.get("ignore_index", IGNORED)


def draw(
    tokens: int,
    hidden: int,
    classes: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    reduction: str = "none",
    bias: bool = False,
    class_weight: bool = False,
    **terms: Any,
) -> Inputs:
    """Return a call with random numbers, logits of about unit size and strides that are not trivial.

    Every seventh token is ignored, the second one first.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device=device)

    target = torch.randint(0, classes, (tokens,), generator=generator, device=device)
    target[1::7] = terms.get("ignore_index", IGNORED)
    arriving = values(2 * tokens + 2)
    return Inputs(
        hidden=values(tokens, 2 * hidden).to(dtype)[:, ::2],
        weight=(values(hidden, classes) * hidden**-0.5).to(dtype).t(),
        target=target,
        arriving=arriving[: 2 * tokens : 2] if reduction == "none" else arriving[0],
        bias=values(2 * classes).to(dtype)[::2] if bias else None,
        class_weight=values(2 * classes).abs()[::2] if class_weight else None,
        reduction=reduction,
        terms=terms,
    )


def arrival(inputs: Inputs, kind: str) -> torch.Tensor:
    """Return the gradient that arrives at the losses of "none", in another layout, or with other values, than drawn."""
    arriving = inputs.arriving.clone()
    if kind == "expanded":
        return torch.tensor(0.3, dtype=arriving.dtype).expand(arriving.shape)
    if kind == "zero first":
        arriving[:1] = 0.0
    elif kind == "zero":
        arriving.zero_()
    elif kind == "NaN at an ignored token":
        arriving[~inputs.alive] = float("nan")
    else:
        return inputs.arriving
    return arriving


def truth(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return the loss and the gradients in float64, by autograd."""
    leaves = {"hidden": inputs.hidden, "weight": inputs.weight, "bias": inputs.bias}
    leaves = {name: each.detach().double().requires_grad_() for name, each in leaves.items() if each is not None}
    weights = None if inputs.class_weight is None else inputs.class_weight.double()
    # The reference takes no negative share; the kernel counts one as none, as liger-kernel does.
    terms = {**inputs.terms, "label_smoothing": max(0.0, inputs.terms.get("label_smoothing", 0.0))}
    target = inputs.target.reshape(-1).long()
    with torch.enable_grad():
        losses, _ = reference.token_losses(
            leaves["hidden"].flatten(0, -2),
            leaves["weight"],
            target,
            bias=leaves.get("bias"),
            ce_weight=weights,
            **terms,
        )
        loss = losses.view(inputs.target.shape) if inputs.reduction == "none" else losses.sum()
        if inputs.reduction == "mean":
            loss = loss / (inputs.alive.sum() if weights is None else weights[target[inputs.alive]].sum())
    # The reference takes a gradient that arrives at an ignored token as 0, unless it is NaN.
    arriving = inputs.arriving.double()
    if inputs.reduction == "none":
        arriving = torch.where(inputs.alive, arriving.reshape(-1), 0.0).view(loss.shape)
    slopes = torch.autograd.grad(loss, list(leaves.values()), arriving)
    return {"loss": loss.detach(), **dict(zip(leaves, slopes, strict=True))}


def call(inputs: Inputs, **more: Any) -> torch.Tensor:
    """Return the loss of the public function."""
    return linear_cross_entropy(
        inputs.hidden,
        inputs.weight,
        inputs.target,
        bias=inputs.bias,
        class_weight=inputs.class_weight,
        **{"reduction": inputs.reduction, **inputs.terms, **more},
    )


def leaves_of(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Make hidden states, weight and bias want gradients; return them."""
    named = {"hidden": inputs.hidden, "weight": inputs.weight, "bias": inputs.bias}
    leaves = {name: each.detach().requires_grad_() for name, each in named.items() if each is not None}
    inputs.hidden, inputs.weight, inputs.bias = leaves["hidden"], leaves["weight"], leaves.get("bias")
    return leaves


def found(inputs: Inputs, **more: Any) -> dict[str, torch.Tensor]:
    """Return the loss and the gradients that the kernel computes."""
    leaves = leaves_of(inputs)
    loss = call(inputs, **more)
    slopes = torch.autograd.grad(loss, list(leaves.values()), inputs.arriving.to(loss.dtype))
    return {"loss": loss.detach(), **dict(zip(leaves, slopes, strict=True))}


def errors(seen: dict[str, torch.Tensor], true: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the error of each in the Euclidean norm, relative to the truth; absolute where that is zero."""
    assert seen.keys() == true.keys()
    return {name: error(seen[name], true[name]) for name in true}


def error(seen: torch.Tensor, true: torch.Tensor) -> float:
    assert seen.shape == true.shape
    size = float(true.double().norm())
    return float((seen.double() - true.double()).norm()) / (size or 1.0)


def capture(
    step: Callable[[], dict[str, torch.Tensor]], warm_up: Callable[[], object] | None = None
) -> Callable[[], dict[str, torch.Tensor]]:
    """Record a step in a CUDA graph, after it or another one ran; return a function that replays it and returns its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            (warm_up or step)()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> dict[str, torch.Tensor]:
        graph.replay()
        torch.cuda.synchronize()
        return results

    return replay
