"""Liger's fused linear cross entropy over labelled tokens alone, for every reduction, with this package's kernel.

The seam is the function that Liger's autograd function calls for losses and, for a mean and a sum, gradients. The gradients
are complete when the forward pass ends, as upstream's are, and upstream's backward pass multiplies them by the incoming gradient. Losses,
z-losses, gradients and the token accuracy are upstream's to rounding, and more accurate: the weight gradient is one
product for each class, summed in float32 for any `accum_dtype`. The host does not wait for the number of labels.

Upstream's own code serves

- GPUs of another compute capability than 9, and another Triton than 3.6, which were not measured; the log says so once.
- predicted tokens, which need the first of equal logits, and the token accuracy under a softcap.
- a mean with class weights and a z-loss, which upstream divides by two numbers.
- a backend that is named by the caller (`ce_impl`, `ce_mode`), and arguments that upstream may refuse.

A label that ties with another class for the highest logit counts as right; upstream counts the class that comes first. Where
hidden states need no gradient and the output layer does, it gets one; upstream then has none for either.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megacpp_overlays.feature_probes import liger_flce_labelled as feature
from megacpp_overlays.feature_probes import liger_flce_none_backward as per_token
from megacpp_overlays.kernels.linear_cross_entropy import liger
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime import dynamo

if TYPE_CHECKING:
    import torch

    from megacpp_overlays.kernels.linear_cross_entropy.parallel import Forward
    from megacpp_overlays.kernels.linear_cross_entropy.shard import GradientRequest

_ID = "liger-flce-labelled"
_BACKENDS = ("ce_impl", "ce_mode")
_REDUCTIONS = ("none", "sum", "mean")


def _make_forward(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    names, defaults = liger.parameters(original)
    compute = dynamo.untraced(_compute)

    def fused_linear_cross_entropy_forward(*args: Any, **kwargs: Any) -> Any:
        given = liger.named(names, defaults, args, kwargs)
        if given is None or not _is_served(given):
            return original(*args, **kwargs)  # upstream raises for arguments that do not fit
        return compute(given)

    return fused_linear_cross_entropy_forward


def _compute(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return upstream's outputs: loss, z-loss, token accuracy, predicted tokens, gradients of input, weight and bias."""
    import torch

    from megacpp_overlays.kernels.linear_cross_entropy.function import mean_divisor
    from megacpp_overlays.kernels.linear_cross_entropy.memory import process_wide
    from megacpp_overlays.kernels.linear_cross_entropy.parallel import Group, backward_pass, forward_pass

    memory, call, wanted = process_wide(), liger.understood(given), _wanted(given)
    with torch.autocast(call.rows.device.type, enabled=False):
        found = forward_pass(
            call.rows, call.labels, call.layer, call.terms, Group(), memory, comes_back=wanted is not None
        )
        divisor = None
        if given["reduction"] == "mean":  # 0 where no token counts
            divisor = mean_divisor(call.labels, call.layer, call.terms, found.losses.dtype)
            divisor = torch.where((call.labels != call.terms.ignore_index).any(), divisor, 1)
        gradients: tuple[Any, ...] = (None, None, None)
        if wanted is not None:
            arrives = given["token_grad_output"]
            if arrives is None:
                arrives = torch.ones_like(found.losses[:1]) if divisor is None else 1 / divisor
            gradients = backward_pass(
                arrives.expand(call.labels.shape),
                call.rows,
                call.labels,
                found.statistics,
                call.layer,
                call.terms,
                Group(),
                memory,
                wanted,
                kept=found.kept,
            )
    of_input, of_weight, of_bias = gradients
    if of_input is None:
        of_input = torch.zeros_like(given["_input"])  # as upstream, which multiplies it
    accuracy = _accuracy(call, found, given["reduction"]) if given["return_token_accuracy"] else None
    loss = _reduced(found.losses, given["reduction"], divisor).float()
    z_loss = liger.z_losses(found, given)
    if z_loss is not None:
        z_loss = _reduced(z_loss, given["reduction"], divisor).to(given["_input"].dtype)
    return loss, z_loss, accuracy, None, of_input, of_weight, of_bias


def _wanted(given: Mapping[str, Any]) -> GradientRequest | None:
    """Return the gradients to compute: those that the caller asks for or, by default, those that the arguments require."""
    from megacpp_overlays.kernels.linear_cross_entropy.shard import GradientRequest

    x, weight, bias = given["_input"], given["weight"], given["bias"]
    asked, of_weight = given["compute_gradients"], given["weight_requires_grad"]
    found = GradientRequest(
        hidden=x.requires_grad if asked is None else asked,
        hidden_dtype=x.dtype,
        weight=asked is not False and (weight.requires_grad if of_weight is None else of_weight),
        bias=asked is not False and bias is not None and (bias.requires_grad or asked is True),
    )
    return found if found.hidden or found.weight or found.bias else None


def _reduced(losses: torch.Tensor, reduction: str, divisor: torch.Tensor | None) -> torch.Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if divisor is None else losses.sum() / divisor


def _accuracy(call: liger.Call, found: Forward, reduction: str) -> torch.Tensor:
    """Return 1.0 for each token whose label has the highest logit, float32; the fraction of labelled tokens if reduced."""
    labelled = call.labels != call.terms.ignore_index
    right = (labelled & (found.statistics.label_logit == found.statistics.maximum)).float()
    return right if reduction == "none" else right.sum() / labelled.sum()


def _is_served(given: Mapping[str, Any]) -> bool:
    """Return whether the kernel computes everything that these arguments ask for."""
    chunks = given.get("chunk_mem_const", 1)
    return (
        given["reduction"] in _REDUCTIONS
        and all(given.get(name) is None for name in _BACKENDS)
        and type(chunks) is int
        and chunks >= 1
        and given["return_predicted_tokens"] is False
        and isinstance(given["return_token_accuracy"], bool)
        and not (given["return_token_accuracy"] and given["softcap"] is not None)
        and not (given["reduction"] == "mean" and given["ce_weight"] is not None and given["lse_square_scale"])
        and liger.is_usual(given)
        and _is_measured(given["_input"].device)
    )


def _is_measured(device: torch.device) -> bool:
    """Return whether the kernel was measured on devices like this one, or computes in plain PyTorch, as on the CPU."""
    from megacpp_overlays.kernels.measured import declines

    return not declines(device, _ID, "liger-kernel's own fused linear cross entropy serves it")


def _witness(module: ModuleType) -> Observation:
    """Inspect the loaded objects. Running upstream's passes would launch kernels."""
    exported = getattr(sys.modules.get("liger_kernel.ops"), per_token.FUNCTION, getattr(module, per_token.FUNCTION))
    if exported is not getattr(module, per_token.FUNCTION):
        return Observation(broken=False, seen=f"liger_kernel.ops exports the one of {exported.__module__}")
    core = inspect.signature(getattr(module, per_token.CORE_FORWARD)).parameters
    if "token_grad_output" not in core:
        return Observation(broken=False, seen=f"{per_token.CORE_FORWARD} has no token_grad_output")
    return Observation(broken=True, seen=f"{per_token.CORE_FORWARD} takes every token")


_LOG_3 = math.log(3)
_LOSS = math.log(80 / 3)
"""Sum of the losses of the three labelled tokens of the self-test."""
_SLOPES = (-0.25, 0.9, 0.0, -0.5)
"""Gradients of the first logits of its tokens."""


def _self_test(module: ModuleType) -> Observation:
    """Compute four tokens with the arguments of upstream's autograd function, for each reduction.

    Hidden size 1, two classes, weights (ln 3, 0): a token with hidden state x has probabilities
    3**x / (3**x + 1) and 1 / (3**x + 1). Of x = 1, 2, 1, 0 the third token is ignored; the labels of the others are 0, 1 and 0,
    and all but the second have a highest logit, the last one a tie.

    In float64, which neither autocast nor Triton's interpreter affects.
    """
    import torch

    def numbers(values: Any) -> Any:
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    core = getattr(module, per_token.CORE_FORWARD)
    states = [1.0, 2.0, 1.0, 0.0]
    given = {
        "_input": numbers([[each] for each in states]).requires_grad_(),
        "weight": numbers([[_LOG_3], [0.0]]).requires_grad_(),
        "target": torch.tensor([0, 1, -100, 0], dtype=torch.int64, device="cpu"),
        "bias": numbers([0.0, 0.0]).requires_grad_(),
        "return_token_accuracy": True,
    }
    thrice = {"token_grad_output": numbers([3.0] * 4), "compute_gradients": True, "weight_requires_grad": True}
    wrong = []
    for reduction, factor, more in (("mean", 1 / 3, {}), ("sum", 1.0, {}), ("none", 3.0, thrice)):
        with torch.no_grad():
            loss, _, accuracy, _, *found = core(**given, reduction=reduction, **more)
        slopes = [factor * each for each in _SLOPES]
        along = sum(x * slope for x, slope in zip(states, slopes, strict=True))
        right = ([each * _LOG_3 for each in slopes], [along, -along], [sum(slopes), -sum(slopes)])
        near = all(_is_near(each.flatten().tolist(), values) for each, values in zip(found, right, strict=True))
        total, share = (_LOSS, 2.0) if reduction == "none" else (_LOSS * factor, 2 / 3)
        if not (near and _is_near([float(loss.sum()), float(accuracy.sum())], [total, share])):
            wrong.append(reduction)
    said = f"wrong for {', '.join(wrong)}" if wrong else "losses and gradients are those of labelled tokens"
    return Observation(broken=bool(wrong), seen=said)


def _is_near(seen: list[float], right: list[float]) -> bool:
    return all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(seen, right, strict=True))


OVERLAY = Overlay(
    id=_ID,
    pack=46,
    title="Liger's fused linear cross entropy computes labelled tokens alone, for every reduction",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={
        feature.EVERY_TOKEN: (Replacement(symbol=per_token.CORE_FORWARD, make=_make_forward),),
    },
    unsupported={
        feature.OLDER: (
            "in this release gradients are not computed per token, and its contract was not read for other reductions; "
            "use liger-kernel 0.8.2 or newer"
        ),
    },
    witness=_witness,
    self_test=_self_test,
    opt_in=True,
    symptoms=(
        "loss takes as long with few labels as with all",
        "SFT is slow with mostly masked prompts, with Liger",
        "fused linear cross entropy is slow",
    ),
    concerns="liger_loss",
    breaks="a loss with a tenth of its tokens labelled takes as long as with all, in Liger's fused linear cross entropy",
    brief="Liger's loss at the cost of its labels",
    until="liger-kernel computes labelled tokens alone",
    retire_when="every supported liger-kernel leaves tokens without a label out of its products",
    threads=(
        Thread(
            repository="linkedin/Liger-Kernel",
            number=827,
            state="open, opened 2025-07-21: worse training with the fused loss",
        ),
    ),
    last_validated=(
        "2026-11-24, H200, torch 2.11.0+cu130, triton 3.6.0, transformers 5.17.0: liger-kernel 0.8.2 and 0.8.5; 0.8.2 to 0.8.5 on "
        "x86-64 in the Triton interpreter"
    ),
)
