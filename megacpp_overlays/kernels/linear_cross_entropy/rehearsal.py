"""CPU run of Megatron's fused linear cross entropy, with the portable entry below it: a self-test of overlays.

An entry has the forward and backward pass of a platform; see `entry`. Upstream's functions around it do arithmetic of
their own, such as the division by the number of tokens for a "mean". The run executes these functions as they are loaded,
and compares losses and gradients with a float64 reference.

The run changes no global state. It executes copies of upstream's functions with other globals, so the upstream module
stays as it is and no GPU is used. It calls `forward` and `backward` of the autograd function without autograd, whose first
backward pass starts a thread for each GPU: a process with such threads must not fork.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from megacpp_overlays.kernels.linear_cross_entropy import entry
from megacpp_overlays.kernels.linear_cross_entropy.rehearsal_reference import IGNORE_INDEX, Results, batch, expected

PUBLIC = "linear_cross_entropy"
"""Name of upstream's public function."""
_REDUCTIONS = ("none", "sum", "mean")
_RESULTS = ("the loss", "the gradient of the hidden states", "the gradient of the weight")
"""Names of the fields of `Results`, for messages."""


class Rehearsal:
    """A run of upstream's public function, forward and backward, on CPU tensors.

    Args:
        public: the object that upstream has under the name `PUBLIC`.
        getter: name of the function that returns the platform, in the module of the autograd function.
        function: name of the autograd function, in the module of `public`.
        forward: an entry's forward pass; see `entry`.
        backward: an entry's backward pass.
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
        autograd_function = public.__globals__[function]
        platform = SimpleNamespace(forward_func=forward, backward_func=backward)
        names = {getter: lambda: platform, "torch": _torch_without_nvtx()}
        self._forward = _with_globals(autograd_function.forward, names)
        self._backward = _with_globals(autograd_function.backward, names)
        self._context = _Context()
        self.loss = _with_globals(public, {function: SimpleNamespace(apply=self._apply)})
        """Callable with the signature of `public`."""

    def gradients(self, arriving: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of hidden states and weight, in their shapes and dtypes, from the last call of `loss`.

        Args:
            arriving: gradient of that loss, in its shape, float32.
        """
        of_hidden, of_weight, *_ = self._backward(self._context, arriving)
        return of_hidden, of_weight

    def _apply(self, *arguments: Any) -> Any:
        self._context = _Context()
        return self._forward(self._context, *arguments)


class _Context(SimpleNamespace):
    """Stand-in for the context object of an autograd function."""

    def save_for_backward(self, *tensors: Any) -> None:
        """Store tensors as `saved_tensors`."""
        self.saved_tensors = tensors


def wrong(rehearsal: Rehearsal) -> Iterator[str]:
    """Yield a sentence for each loss and each gradient that differs from the reference, for every reduction."""
    inputs = batch()
    for reduction in _REDUCTIONS:
        loss = rehearsal.loss(
            inputs.hidden, inputs.weight, inputs.labels, reduction=reduction, ignore_index=IGNORE_INDEX
        )
        seen = Results(loss, *rehearsal.gradients(inputs.arriving(reduction)))
        for name, found, true in zip(_RESULTS, seen, expected(inputs, reduction), strict=True):
            if found.shape != true.shape or not torch.allclose(found.double(), true, rtol=1e-4, atol=1e-5):
                yield f'with reduction "{reduction}" {name} is not that of the logits'


def _with_globals(function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """Return a copy of a function with some of its globals replaced."""
    replaced = {**function.__globals__, **names}
    copy = FunctionType(function.__code__, replaced, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _torch_without_nvtx() -> SimpleNamespace:
    """Return a copy of the torch namespace with no-op NVTX ranges, at which a build without CUDA raises."""
    nvtx = SimpleNamespace(range=contextlib.nullcontext)
    return SimpleNamespace(**{**vars(torch), "cuda": SimpleNamespace(**{**vars(torch.cuda), "nvtx": nvtx})})
