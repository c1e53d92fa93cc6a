"""Workload of the benchmark of linear cross entropy: sizes, data, and ways to a loss and its gradients."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import timing
import torch
from linear_cross_entropy.goals import (
    APART,
    COMPILED,
    COMPUTED,
    EAGER,
    ENTRY,
    FOUR,
    KEPT,
    KEPT_COMPUTED,
    KEPT_SKIPPED,
    LABELLED_ALONE,
    OURS,
    SKIPPED,
    THREE,
    UNMASKED,
)
from torch.nn import functional

IGNORED = -100
"""The target of a token that does not count: PyTorch's default, and that of every peer."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the output layer."""

    tokens: int
    hidden: int
    vocabulary: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Return the shape that `TOKENSxHIDDENxVOCABULARY` says."""
        return cls(*map(int, text.split("x")))


@dataclass(frozen=True)
class Data:
    """Leaves, labels, and the gradients of the losses in the backward pass."""

    x: Any
    weight: Any
    target: Any
    incoming: Any
    """Float32 for each token, half of them zero; used where a loss is kept per token."""


@dataclass(frozen=True)
class Way:
    """One way to get the loss and its gradients."""

    name: str
    kind: str
    """ours, plain or peer."""
    reduction: str
    """none or mean."""
    loss: Callable[[Any, Any, Any], Any]
    """From x, weight and target."""
    options: frozenset[str] = field(default_factory=frozenset)
    """Its options, of OPTIONS."""

    def stages(self, data: Data) -> timing.Stages:
        """Return forward and backward."""

        def backward(loss: Any) -> Any:
            incoming = data.incoming.to(loss.dtype) if self.reduction == "none" else None
            return torch.autograd.grad(loss, (data.x, data.weight), incoming)

        return (lambda: self.loss(data.x, data.weight, data.target), backward)


def make_data(shape: Shape, labels: str, device: str) -> Data:
    """Return random bfloat16 with logits of variance 1.

    Args:
        shape: sizes.
        labels: `uniform`, or `zipf`: the k-th most frequent class has probability proportional to 1 / k, about as in
            text, and classes are in random order.
        device: cuda or cpu.
    """
    torch.manual_seed(0)
    bf16 = torch.bfloat16
    x = torch.randn(shape.tokens, shape.hidden, device=device, dtype=bf16)
    weight = torch.randn(shape.vocabulary, shape.hidden, device=device, dtype=bf16).mul_(shape.hidden**-0.5)
    if labels == "zipf":
        ranks = torch.arange(1, shape.vocabulary + 1, device=device)
        drawn = torch.multinomial(1.0 / ranks, shape.tokens, replacement=True)
        target = torch.randperm(shape.vocabulary, device=device)[drawn]
    else:
        target = torch.randint(shape.vocabulary, (shape.tokens,), device=device)
    kept = torch.rand(shape.tokens, device=device) < 0.5
    incoming = kept * (0.5 + torch.rand(shape.tokens, device=device)) / shape.tokens
    return Data(x.requires_grad_(), weight.requires_grad_(), target, incoming)


# --- floors ----------------------------------------------------------------------------------------------------


def logits_gradient(data: Data, reduction: str) -> Any:
    """Return the gradient of the logits in bfloat16: operand of two products, and power depends on operands."""
    scale = data.incoming if reduction == "none" else torch.full_like(data.incoming, 1 / data.target.numel())
    with torch.no_grad():
        gradient = data.x @ data.weight.t()
        for first in range(0, gradient.size(0), 1024):
            rows = slice(first, first + 1024)
            probability = torch.softmax(gradient[rows].float(), dim=1)
            probability.scatter_add_(1, data.target[rows, None], torch.full_like(probability[:, :1], -1.0))
            gradient[rows] = probability.mul_(scale[rows, None])
    return gradient


def floors(data: Data, reduction: str) -> dict[str, timing.Stages]:
    """Return the products that no method can do without: with the logits kept, and with them computed twice."""
    x, weight = data.x.detach(), data.weight.detach()
    gradient = logits_gradient(data, reduction)
    logits, of_x, of_weight = torch.empty_like(gradient), torch.empty_like(x), torch.empty_like(weight)

    def project(_: Any = None) -> Any:
        return torch.mm(x, weight.t(), out=logits)

    def both(_: Any) -> Any:
        torch.mm(gradient, weight, out=of_x)
        return torch.mm(gradient.t(), x, out=of_weight)

    return {THREE: (project, both), FOUR: (project, lambda _: both(project()))}


# --- ways that are always there --------------------------------------------------------------------------------


def ours() -> list[Way]:
    """Return the kernel of this package, as it comes and with the logits kept.

    Each looks at its masks in its first backward pass. Under a mask it skips tokens then, so computing all is a way of
    its own; without one it computes all, so skipping is.
    """
    from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory

    ways = []
    for logits, names in (("recompute", (OURS, COMPUTED, SKIPPED)), ("keep", (KEPT, KEPT_COMPUTED, KEPT_SKIPPED))):
        itself, computed, skipped = names
        ways += [way(itself, reduction, Memory(logits=logits)) for reduction in ("none", "mean")]
        ways.append(way(computed, "none", Memory(logits=logits, masked="compute")))
        ways.append(way(skipped, "mean", Memory(logits=logits, masked="skip")))
    return [*ways, Way(ENTRY, "ours", "none", entry_loss(), frozenset({"ignore_index", "vocabulary parallel"}))]


def way(name: str, reduction: str, memory: Any) -> Way:
    """Return one way to use the kernel of this package."""
    from megacpp_overlays.kernels.linear_cross_entropy import linear_cross_entropy

    def loss(x: Any, weight: Any, target: Any) -> Any:
        return linear_cross_entropy(x, weight, target, reduction=reduction, memory=memory)

    return Way(name, "ours", reduction, loss, options(linear_cross_entropy))


def unmasked() -> Way:
    """Return the kernel as it comes, for data of its own."""
    from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory

    return way(UNMASKED, "none", Memory())


def entry_loss() -> Callable[[Any, Any, Any], Any]:
    """Return the loss of each token by the entry that Megatron's dispatcher gets, whose logits are float32."""
    from megacpp_overlays.kernels.linear_cross_entropy import entry

    class Entry(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, target: Any) -> Any:
            losses, maximum, total, count, *_, rows = entry.forward_on_any_device(
                x, weight, target, None, "none", -100, False
            )
            ctx.save_for_backward(rows, weight, target, maximum, total, count)
            return losses

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            gradients = entry.backward_on_any_device(grad, *ctx.saved_tensors, "none", -100, None, 0, 1, False)
            return *gradients, None

    return Entry.apply


def plain_loss(x: Any, weight: Any, target: Any) -> Any:
    """Return the loss of each token as plain PyTorch computes it: logits in bfloat16, the rest in float32."""
    return functional.cross_entropy(functional.linear(x, weight).float(), target, reduction="none")


def plain() -> list[Way]:
    """Return plain PyTorch."""
    return [Way(EAGER, "plain", "none", plain_loss, options(functional.linear, functional.cross_entropy))]


def compiled() -> list[Way]:
    """Return plain PyTorch, compiled; anew for each shape."""
    torch.compiler.reset()
    loss = torch.compile(plain_loss, dynamic=False)
    return [Way(COMPILED, "plain", "none", loss, options(functional.linear, functional.cross_entropy))]


# --- batches some of whose tokens have a label -----------------------------------------------------------------


def with_labels(data: Data, share: float) -> Data:
    """Return the data where a share of the tokens, anywhere, has a label; the others are ignored."""
    tokens = data.target.numel()
    generator = torch.Generator().manual_seed(1)
    ignored = torch.randperm(tokens, generator=generator)[round(share * tokens) :].to(data.target.device)
    target = data.target.clone()
    target[ignored] = IGNORED
    return replace(data, target=target, incoming=torch.full_like(data.incoming, 1 / max(1, round(share * tokens))))


def labelled_alone(data: Data) -> Data:
    """Return the labelled tokens, for products that need no more."""
    kept = data.target != IGNORED
    x = data.x.detach()[kept].requires_grad_()
    return Data(x, data.weight, data.target[kept], data.incoming[kept])


def selecting(way: Way) -> Way:
    """Return a way that passes the labelled tokens alone to another one, and takes the mean of its losses."""

    def loss(x: Any, weight: Any, target: Any) -> Any:
        kept = (target != IGNORED).nonzero().squeeze(1)  # waits for the device
        found = way.loss(x.index_select(0, kept), weight, target.index_select(0, kept))
        return found.float().mean() if way.reduction == "none" else found

    return Way(way.name + LABELLED_ALONE, way.kind, "mean", loss, way.options)


def skipping() -> list[Way]:
    """Return the kernel of this package with `skip`, with `compute`, and with `auto`, for batches with ignored tokens."""
    from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory

    ways = []
    for logits, names in (("recompute", (OURS, SKIPPED, COMPUTED)), ("keep", (KEPT, KEPT_SKIPPED, KEPT_COMPUTED))):
        for name, masked in zip(names, ("auto", "skip", "compute"), strict=True):
            ways.append(way(name, "mean", Memory(logits=logits, masked=masked)))
    return [*ways, way(APART, "mean", Memory(masked="skip", panels=1))]


# --- options of a way, by its signature ------------------------------------------------------------------------

OPTIONS = {
    "ignore_index": {"ignore_index"},
    "bias": {"bias", "linear_bias"},
    "softcap": {"softcap", "logit_softcapping"},
    "label smoothing": {"label_smoothing"},
    "vocabulary parallel": {"group", "tp_group", "dist_process_group", "process_group", "vocab_parallel_options"},
}


def options(*functions: Callable[..., Any]) -> frozenset[str]:
    """Return which of OPTIONS the parameters of some functions name."""
    names: set[str] = set()
    for function in functions:
        if isinstance(function, types.BuiltinFunctionType):  # it has no signature, but the first line of its text does
            names |= set(re.findall(r"\w+", (function.__doc__ or "").strip().partition("\n")[0]))
        else:
            names |= set(inspect.signature(function).parameters)
    return frozenset(option for option, words in OPTIONS.items() if words & names)
