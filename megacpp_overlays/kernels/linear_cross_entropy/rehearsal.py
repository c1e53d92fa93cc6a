"""Run Megatron's fused linear cross entropy on the CPU: upstream's own functions, with the portable entry below them.

What upstream's autograd function and what calls it do with the numbers of an entry is a part of the contract: who divides,
and by what. So they are run as they are loaded, down to the entry, which computes in plain PyTorch on CPU tensors. They run
with other globals: nothing that other threads can see is touched, and no device is asked. Autograd itself is not used:
its first backward pass starts a thread for each GPU, which a process that forks later must not have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from megacpp_overlays.kernels.linear_cross_entropy import entry
from megacpp_overlays.kernels.linear_cross_entropy.reference import token_losses

PUBLIC = "linear_cross_entropy"
"""Name of the function that upstream's callers use."""
_IGNORED = -7
"""Not what upstream takes by default, so that nobody passes by saying nothing."""
_REDUCTIONS = ("none", "sum", "mean")


class _Context(SimpleNamespace):
    """Stands for the object in which an autograd function leaves what its backward pass needs."""

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors, as `saved_tensors`."""
        self.saved_tensors = tensors


class Rehearsal:
    """A run of upstream's function on the CPU, forward and backward.

    Args:
        public: what stands under the name `PUBLIC`.
        getter: name of the function that gives the platform, in the module of the autograd function.
        function: name of the autograd function, in the module of `public`.
        forward: an entry's forward pass; see `entry`.
        backward: its backward pass.
    """

    def __init__(
        self,
        public: FunctionType,
        getter: str,
        function: str,
        *,
        forward: Callable[..., Any] = entry.forward_on_any_device,
        backward: Callable[..., Any] = entry.backward_on_any_device,
    ) -> None:
        platform = SimpleNamespace(forward_func=forward, backward_func=backward)
        upstreams = public.__globals__[function]
        given = {getter: lambda: platform, "torch": _torch_without_profiler()}
        self._forward, self._backward = (_with(getattr(upstreams, way), given) for way in ("forward", "backward"))
        self.loss = _with(public, {function: SimpleNamespace(apply=self._apply)})
        """As `public`, of CPU tensors."""
        self._context = _Context()

    def _apply(self, *given: Any) -> Any:
        self._context = _Context()
        return self._forward(self._context, *given)

    def gradients(self, arriving: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of hidden states and weight, for one that arrives at the last loss."""
        of_hidden, of_weight, *_ = self._backward(self._context, arriving)
        return of_hidden, of_weight


def _with(function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """Return the function, with other meanings of some global names."""
    made_up = {**function.__globals__, **names}
    copy = FunctionType(function.__code__, made_up, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _torch_without_profiler() -> SimpleNamespace:
    """Return torch with marks for a profiler that do nothing: a torch that was built without CUDA raises at them."""
    marks = SimpleNamespace(range=contextlib.nullcontext)
    return SimpleNamespace(**{**vars(torch), "cuda": SimpleNamespace(**{**vars(torch.cuda), "nvtx": marks})})


def wrong(rehearsal: Rehearsal) -> Iterator[str]:
    """Yield what is not as the logits themselves have it, in words: losses and gradients of every reduction."""
    hidden = (torch.arange(24.0, dtype=torch.float32, device="cpu").view(6, 4) - 11) / 8
    weight = (torch.arange(20.0, dtype=torch.float32, device="cpu").view(5, 4).flip(0) - 7) / 16
    labels = torch.tensor([0, 4, _IGNORED, 2, 2, 1], device="cpu")
    each = torch.tensor([1.0, -2.0, 3.0, 0.5, 4.0, 0.25], dtype=torch.float32, device="cpu")
    kept = (labels != _IGNORED).to(torch.float64)
    rows, classes = hidden.double(), weight.double()
    losses, _ = token_losses(rows, classes, labels, ignore_index=_IGNORED)
    probabilities = torch.softmax(rows @ classes.t(), dim=1)
    slopes = probabilities - torch.nn.functional.one_hot(labels.clamp(min=0), classes.shape[0]).double()
    for reduction in _REDUCTIONS:
        divisor = kept.sum() if reduction == "mean" else 1.0
        true = losses if reduction == "none" else losses.sum() / divisor
        arriving = each if reduction == "none" else each[3]
        logits = slopes * (kept * arriving.double() / divisor).unsqueeze(1)
        loss = rehearsal.loss(hidden, weight, labels, reduction=reduction, ignore_index=_IGNORED)
        of_hidden, of_weight = rehearsal.gradients(arriving)
        compared = {
            "the loss": (loss, true),
            "the gradient of the hidden states": (of_hidden, logits @ classes),
            "the gradient of the weight": (of_weight, logits.t() @ rows),
        }
        for what, (seen, expected) in compared.items():
            if seen.shape != expected.shape or not torch.allclose(seen.double(), expected, rtol=1e-4, atol=1e-5):
                yield f'with reduction "{reduction}" {what} is not that of the logits'
