"""Liger's fused linear cross entropy: does an output layer learn where hidden states want no gradient?

A linear probe, or a head that is trained on a frozen model: hidden states are constants, and the weights of the output layer are parameters. The mean and
the sum of losses run forwards and backwards through the module and through the function that liger-kernel offers. Gradients are compared with float64.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any, NamedTuple

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent, triton_interpreter

OVERLAY = "liger-flce-frozen-states"
SCALE = 1.5
"""The loss is multiplied by it, as by a loss scale: backward passes multiply gradients that the forward pass has left."""


class Shape(NamedTuple):
    """Sizes of one problem, and the relative error (Frobenius norm) that its dtype explains."""

    tokens: int
    hidden: int
    vocabulary: int
    dtype: str
    tolerance: float


SMALL = Shape(12, 16, 32, "float32", 1e-4)
REFUSED = ("'NoneType' object has no attribute 'detach'", "variable 'grad_weight'")
"""In errors of 0.6.4 to 0.7.0, where the output layer has a bias, and of 0.6.3."""


def _interpreter() -> Behaviour:
    with triton_interpreter():
        return _measured(SMALL, "cpu")


def _gpu() -> Behaviour:
    return _measured(Shape(2048, 1024, 32000, "bfloat16", 3e-2), "cuda")


def _measured(shape: Shape, device: str) -> Behaviour:
    said, worst = [], 0.0
    for entry, reduction, bias in itertools.product(("module", "function"), ("mean", "sum"), (False, True)):
        try:
            errors = learnt(shape, device, entry, reduction, bias=bias)
        except (AttributeError, UnboundLocalError) as error:
            if not any(each in str(error) for each in REFUSED):
                raise
            worst, found = 1.0, str(error)
        else:
            worst = max(worst, *errors.values())
            found = ", ".join(f"{what} {error:.1e}" for what, error in errors.items())
        said.append(f"{entry}, {reduction}: {found}")
    seen = f"hidden states want no gradient, {shape.dtype}; relative errors against float64: {'; '.join(said)}"
    return Behaviour(broken=worst > shape.tolerance, seen=seen)


def learnt(shape: Shape, device: str, entry: str, reduction: str, *, bias: bool) -> dict[str, float]:
    """Return relative errors of the gradients of weights and biases, 1 where there is none.

    Args:
        shape: of the problem; every fifth token has no label.
        device: name of it.
        entry: `module` or `function`.
        reduction: of the losses.
        bias: whether the output layer has one.
    """
    import torch

    generator = torch.Generator().manual_seed(9)
    states = torch.randn(shape.tokens, shape.hidden, generator=generator)
    weight = torch.randn(shape.vocabulary, shape.hidden, generator=generator) / shape.hidden**0.5
    of_classes = torch.randn(shape.vocabulary, generator=generator)
    target = torch.randint(shape.vocabulary, (shape.tokens,), generator=generator)
    target[::5] = -100
    dtype = getattr(torch, shape.dtype)
    given = [each.to(device, dtype) for each in (states, weight, *([of_classes] if bias else []))]
    layer = [each.requires_grad_() for each in given[1:]]
    (losses(entry, reduction)(given[0], target.to(device), *layer) * SCALE).backward()
    true = _gradients(given[0], target.to(device), layer, reduction)
    names = ("weight", "bias")[: len(layer)]
    return {name: _error(each.grad, right) for name, each, right in zip(names, layer, true, strict=True)}


def losses(entry: str, reduction: str, **options: Any) -> Any:
    """Return the loss as a function of hidden states, targets, weights and biases.

    Raises:
        Blocked: this liger-kernel cannot be imported here.
        TargetAbsent: it has no such entry, or no reduction.
    """
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function
        from liger_kernel.transformers import functional
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise Blocked("this liger-kernel cannot be imported without transformers") from error
    if "reduction" not in inspect.signature(Function.forward).parameters:
        raise TargetAbsent("the fused linear cross entropy has no reduction")
    if entry == "function":
        function = functional.liger_fused_linear_cross_entropy
        if "reduction" not in inspect.signature(function).parameters:
            raise TargetAbsent("the function has no reduction of its own")
        return lambda states, target, weight, *bias: function(
            states, weight, target, *bias, reduction=reduction, **options
        )
    module = LigerFusedLinearCrossEntropyLoss(reduction=reduction, **options)
    return lambda states, target, weight, *bias: module(weight, states, target, *bias)


def _gradients(states: Any, target: Any, layer: list[Any], reduction: str) -> tuple[Any, ...]:
    import torch

    weight, *bias = (each.detach().double().requires_grad_() for each in layer)
    logits = torch.nn.functional.linear(states.double(), weight, *bias)
    loss = torch.nn.functional.cross_entropy(logits, target, reduction=reduction) * SCALE
    found: tuple[Any, ...] = torch.autograd.grad(loss, [weight, *bias])
    return found


def _error(found: Any, true: Any) -> float:
    return 1.0 if found is None else float((found.double() - true).norm() / true.norm())


_VERSIONS = ("liger-kernel", "torch", "triton", "numpy")
CASES = (
    Case(
        name="interpreter",
        overlay=OVERLAY,
        device="cpu",
        versions=_VERSIONS,
        run=_interpreter,
        environment={"TRITON_INTERPRET": "1"},
    ),
    Case(
        name="gpu-bfloat16",
        overlay=OVERLAY,
        device="cuda",
        versions=_VERSIONS,
        run=_gpu,
        environment={"TRITON_INTERPRET": "0"},
    ),
)
