"""Fused linear cross entropy with `reduction="none"`: is each token's gradient scaled by its own upstream gradient?

The loss is masked at random, token by token, as in fine-tuning on answers only. The gradients of the masked sum are
compared with float64. Two masks: one that counts the first token and one that drops it, because the defect multiplies
every gradient by what arrives at the first token.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, NamedTuple

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent, triton_interpreter


class Shape(NamedTuple):
    """Sizes of one problem, and the relative error (Frobenius norm) that its dtype explains."""

    tokens: int
    hidden: int
    vocabulary: int
    dtype: str
    tolerance: float


def _interpreter() -> Behaviour:
    with triton_interpreter():
        return _measure(Shape(16, 16, 32, "float32", 1e-4), "cpu")


def _gpu_float32() -> Behaviour:
    return _measure(Shape(512, 256, 4096, "float32", 1e-3), "cuda")


def _gpu_bfloat16() -> Behaviour:
    return _measure(Shape(4096, 1024, 32000, "bfloat16", 3e-2), "cuda")


def _measure(shape: Shape, device: str) -> Behaviour:
    import torch

    loss = _loss()
    generator = torch.Generator().manual_seed(9)
    dtype = getattr(torch, shape.dtype)
    x = torch.randn(shape.tokens, shape.hidden, generator=generator).to(device, dtype)
    weight = (torch.randn(shape.vocabulary, shape.hidden, generator=generator) / shape.hidden**0.5).to(device, dtype)
    target = torch.randint(0, shape.vocabulary, (shape.tokens,), generator=generator).to(device)
    mask = torch.randint(0, 2, (shape.tokens,), generator=generator).to(device, torch.float32)

    seen, worst = [], 0.0
    for first, what in ((1.0, "counts"), (0.0, "is masked")):
        mask[0] = first
        given = [tensor.detach().clone().requires_grad_() for tensor in (x, weight)]
        per_token = loss(given[1], given[0], target)
        if per_token.shape != target.shape:
            return Behaviour(broken=True, seen=f'reduction="none" returns {tuple(per_token.shape)}, not one per token')
        try:
            (per_token * mask).sum().backward()
        except AssertionError as error:
            return Behaviour(broken=True, seen=f'the backward pass of reduction="none" is refused: {error}')
        true = _reference(x, weight, target, mask)
        errors = [_error(tensor.grad, each) for tensor, each in zip(given, true, strict=True)]
        seen.append(f"first token {what}: input {errors[0]:.1e}, weight {errors[1]:.1e}")
        worst = max(worst, *(math.inf if math.isnan(error) else error for error in errors))
    text = f"relative gradient error against float64, {shape.dtype}, {mask.numel()} tokens, random mask; "
    return Behaviour(broken=worst > shape.tolerance, seen=f"{text}{'; '.join(seen)}; tolerance {shape.tolerance:.0e}")


def _loss() -> Any:
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise Blocked("this liger-kernel cannot be imported without transformers") from error
    if "reduction" not in inspect.signature(Function.forward).parameters:
        raise TargetAbsent("the fused linear cross entropy has no reduction")
    try:
        return LigerFusedLinearCrossEntropyLoss(reduction="none")
    except AssertionError:  # 0.5.9 to 0.6.2: the module refuses what the function then sums
        return lambda weight, x, target: _by_function(Function, weight, x, target)


def _by_function(function: Any, weight: Any, x: Any, target: Any) -> Any:
    parameters = list(inspect.signature(function.forward).parameters.values())[1:]
    given = {"_input": x, "weight": weight, "target": target, "reduction": "none"}
    outputs = function.apply(*(given.get(each.name, each.default) for each in parameters))
    return outputs[0] if isinstance(outputs, tuple) else outputs


def _reference(x: Any, weight: Any, target: Any, mask: Any) -> tuple[Any, Any]:
    """Return the gradients of the masked sum in float64: input [tokens, hidden], weight [vocabulary, hidden]."""
    import torch

    x, weight = x.double(), weight.double()
    slope = torch.softmax(x @ weight.t(), dim=-1)
    slope[torch.arange(target.numel(), device=target.device), target] -= 1
    slope *= mask.double()[:, None]
    return slope @ weight, slope.t() @ x


def _error(found: Any, true: Any) -> float:
    return float((found.double() - true).norm() / true.norm())


_VERSIONS = ("liger-kernel", "torch", "triton", "numpy")
CASES = (
    Case(
        name="interpreter",
        overlay="liger-flce-none-backward",
        device="cpu",
        versions=_VERSIONS,
        run=_interpreter,
        environment={"TRITON_INTERPRET": "1"},
    ),
    Case(
        name="gpu-float32",
        overlay="liger-flce-none-backward",
        device="cuda",
        versions=_VERSIONS,
        run=_gpu_float32,
        environment={"TRITON_INTERPRET": "0"},
    ),
    Case(
        name="gpu-bfloat16",
        overlay="liger-flce-none-backward",
        device="cuda",
        versions=_VERSIONS,
        run=_gpu_bfloat16,
        environment={"TRITON_INTERPRET": "0"},
    ),
)
