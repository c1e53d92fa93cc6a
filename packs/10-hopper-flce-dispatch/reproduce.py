"""Megatron's fused linear cross entropy: does its dispatcher serve GPUs of capability 8, 9 and 12, and rightly?

`made-up-devices` asks the dispatcher while torch answers for a GPU that is not there; no kernel runs. The two others
run loss and gradients on the real device and compare them with float64.
"""

from __future__ import annotations

import math
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

MODULE = "megatron.core.fusions.fused_linear_cross_entropy"
_GETTER, _SINGLETON = "_get_platform", "_instance"
MAJORS = (8, 9, 12)
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3}
"""Largest relative error (Frobenius norm) of a gradient: it is rounded twice. The loss is float32."""
LOSS_TOLERANCE = 1e-4
TOKENS, HIDDEN, CLASSES = 4096, 1024, 32000


def _made_up_devices() -> Behaviour:
    from unittest import mock

    try:
        module = _module()
    except (AssertionError, ValueError) as error:
        return Behaviour(broken=True, seen=f"the import itself asks for a device: {type(error).__name__}: {error}")
    answers, refused = [], False
    for major in MAJORS:
        made_up: dict[str, Any] = {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "get_device_capability": lambda device=None, major=major: (major, 0),
        }
        with mock.patch.multiple("torch.cuda", **made_up):
            setattr(module.Platform, _SINGLETON, None)
            getattr(module, _GETTER).cache_clear()
            try:
                chosen = _entry(module)
            except (ValueError, AttributeError) as error:
                refused, chosen = True, f"{type(error).__name__}: {error}"
        answers.append(f"capability {major}: {chosen}")
    return Behaviour(broken=refused, seen="; ".join(answers))


def _bfloat16() -> Behaviour:
    return _measure("bfloat16")


def _float16() -> Behaviour:
    return _measure("float16")


def _measure(dtype: str) -> Behaviour:
    """Run 4096 tokens, hidden size 1024, 32000 classes, every seventh token ignored."""
    import torch

    major = torch.cuda.get_device_capability()[0]
    if major not in MAJORS:
        raise Blocked(f"compute capability {major} is not what this pack is about")
    generator = torch.Generator("cuda").manual_seed(10)
    kind = getattr(torch, dtype)
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda", generator=generator).to(kind)
    weight = (3 * torch.randn(CLASSES, HIDDEN, device="cuda", generator=generator) / HIDDEN**0.5).to(kind)
    labels = torch.randint(0, CLASSES, (TOKENS,), device="cuda", generator=generator)
    labels[::7] = -100
    per_token = torch.rand(TOKENS, device="cuda", generator=generator)
    seen, worst = [], 0.0
    # The mean arrives with a loss scale, as in training: without one, gradients of logits are too small for float16.
    for reduction, arriving in (("none", per_token), ("mean", torch.full((), float(TOKENS), device="cuda"))):
        given = [each.clone().requires_grad_() for each in (hidden, weight)]
        try:
            module = _module()
            loss = module.linear_cross_entropy(*given, labels, reduction=reduction)
        except (ValueError, AttributeError) as error:
            return Behaviour(broken=True, seen=f"capability {major}: {type(error).__name__}: {error}")
        entry = _entry(module)
        if entry.startswith("megatron."):
            raise Blocked(f"this tree serves capability {major} by itself, with {entry}")
        loss.backward(arriving)
        true = _reference(hidden, weight, labels, arriving, reduction)
        errors = [_error(each, one) for each, one in zip((loss.detach(), *(g.grad for g in given)), true, strict=True)]
        seen.append(f"{reduction}: loss {errors[0]:.1e}, hidden {errors[1]:.1e}, weight {errors[2]:.1e}")
        scaled = (errors[0] / LOSS_TOLERANCE, errors[1] / TOLERANCE[dtype], errors[2] / TOLERANCE[dtype])
        worst = max(worst, *(math.inf if math.isnan(each) else each for each in scaled))
    text = f"capability {major}, {entry}, relative error against float64, {dtype}: {'; '.join(seen)}"
    limits = f"tolerances {LOSS_TOLERANCE:.0e} and {TOLERANCE[dtype]:.0e}"
    return Behaviour(broken=worst > 1, seen=f"{text}; {limits}")


def _module() -> Any:
    import importlib

    try:
        module = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{MODULE}.".startswith(f"{error.name}."):
            raise
        raise TargetAbsent(f"there is no module {error.name}") from error
    if not hasattr(module, "Platform"):
        raise TargetAbsent(f"{MODULE} has no dispatcher")
    return module


def _entry(module: Any) -> str:
    """Return where the entry comes from that the dispatcher chooses."""
    return str(getattr(module, _GETTER)().forward_func.__module__)


def _reference(hidden: Any, weight: Any, labels: Any, arriving: Any, reduction: str) -> tuple[Any, Any, Any]:
    """Return loss and gradients in float64."""
    import torch

    hidden, weight = hidden.double(), weight.double()
    logits = hidden @ weight.t()
    kept = labels != -100
    column = torch.where(kept, labels, 0).unsqueeze(1)
    losses = torch.where(kept, torch.logsumexp(logits, dim=1) - logits.gather(1, column).squeeze(1), 0)
    scale = torch.where(kept, arriving.double().expand(labels.shape), 0)
    if reduction == "mean":
        losses, scale = losses.sum() / kept.sum(), scale / kept.sum()
    slope = torch.softmax(logits, dim=1)
    slope.scatter_add_(1, column, -torch.ones_like(column, dtype=slope.dtype))
    slope *= scale.unsqueeze(1)
    return losses, slope @ weight, slope.t() @ hidden


def _error(found: Any, true: Any) -> float:
    return float((found.double() - true).norm() / true.norm())


_OVERLAY = "hopper-flce-dispatch"
_VERSIONS = ("megatron-core", "torch", "triton", "nvidia-cutlass-dsl")
CASES = (
    Case(name="made-up-devices", overlay=_OVERLAY, device="cpu", versions=_VERSIONS, run=_made_up_devices),
    Case(name="gpu-bfloat16", overlay=_OVERLAY, device="cuda", versions=_VERSIONS, run=_bfloat16),
    Case(name="gpu-float16", overlay=_OVERLAY, device="cuda", versions=_VERSIONS, run=_float16),
)
