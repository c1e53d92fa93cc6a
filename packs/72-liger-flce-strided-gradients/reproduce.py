"""Liger's fused linear cross entropy and gradients whose rows are not contiguous: are they multiplied by the gradient of the loss?

A weight of an output layer is kept as its transpose, as a layer that is tied to another one's input is, or hidden states are. Losses run forwards and backwards through the function that liger-kernel offers, multiplied as by a loss scale.
Gradients are compared with float64.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent, triton_interpreter

OVERLAY = "liger-flce-strided-gradients"
SCALE = 0.25
TOLERANCE = {"cpu": 1e-4, "cuda": 1e-2}
"""Relative, Frobenius norm; a GPU multiplies shortened numbers."""
SIZES = {"cpu": (12, 16, 32), "cuda": (1024, 512, 4096)}
"""Tokens, channels and classes."""


def _run(device: str) -> Behaviour:
    said, worst = [], 0.0
    for strided, reduction in itertools.product(("weight", "states"), ("mean", "sum")):
        found, right = learnt(device, strided=(strided,), reduction=reduction)
        errors = {name: _error(found[name], right[name]) for name in right}
        worst = max(worst, *errors.values())
        said.append(f"transposed {strided}, {reduction}: {', '.join(f'{name} {each:.1e}' for name, each in errors.items())}")
    return Behaviour(broken=worst > TOLERANCE[device], seen=f"relative errors against float64; {'; '.join(said)}")


def _interpreter() -> Behaviour:
    with triton_interpreter():
        return _run("cpu")


def learnt(device: str = "cpu", *, strided: tuple[str, ...] = (), reduction: str = "mean", scale: float = SCALE) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return gradients of hidden states and of weights, and those of float64.

    Args:
        device: name of it.
        strided: which of `weight` and `states` are transposes.
        reduction: of the losses.
        scale: what the loss is multiplied by.

    Raises:
        Blocked: this liger-kernel cannot be imported here.
        TargetAbsent: its function has no reduction.
    """
    import torch

    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise Blocked("this liger-kernel cannot be imported without transformers") from error
    names = [*inspect.signature(Function.forward).parameters][1:]  # ctx
    if "reduction" not in names:
        raise TargetAbsent("the fused linear cross entropy has no reduction")
    tokens, channels, classes = SIZES[device]
    generator = torch.Generator().manual_seed(72)
    given = {
        "states": torch.randn(tokens, channels, generator=generator).to(device),
        "weight": (torch.randn(classes, channels, generator=generator) / channels**0.5).to(device),
    }
    target = torch.randint(classes, (tokens,), generator=generator).to(device)
    right = {name: each.double().requires_grad_() for name, each in given.items()}
    logits = right["states"] @ right["weight"].t()
    (torch.nn.functional.cross_entropy(logits, target, reduction=reduction) * scale).backward()
    leaves = {name: (each.t().contiguous().t() if name in strided else each).detach().requires_grad_() for name, each in given.items()}
    options = {"_input": leaves["states"], "weight": leaves["weight"], "target": target, "reduction": reduction}
    parameters = inspect.signature(Function.forward).parameters
    arguments = [options.get(name, parameters[name].default) for name in names]
    found = Function.apply(*arguments)
    (scale * (found[0] if isinstance(found, tuple) else found)).backward()
    return {name: each.grad for name, each in leaves.items()}, {name: each.grad for name, each in right.items()}


def _error(found: Any, true: Any) -> float:
    return float((found.double() - true).norm() / true.norm())


_VERSIONS = ("liger-kernel", "torch", "triton", "numpy")
CASES = (
    Case(name="transposed-interpreter", overlay=OVERLAY, device="cpu", versions=_VERSIONS, run=_interpreter, environment={"TRITON_INTERPRET": "1"}),
    Case(name="transposed-cuda", overlay=OVERLAY, device="cuda", versions=_VERSIONS, run=lambda: _run("cuda")),
)
