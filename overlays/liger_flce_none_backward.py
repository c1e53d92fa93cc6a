"""Fused linear cross entropy with `reduction="none"`: scale each token's gradient by its own upstream gradient.

The forward pass stays upstream's. It is called without gradients where the release can do that, because what it
would compute cannot be used: it is summed over tokens before their upstream gradients are known. The backward pass
computes the logits again, chunk by chunk. Every other reduction goes to upstream's own code, both ways.

As in liger-kernel 0.8.2, where this is upstream's own way: the hidden states and the output layer must not be
changed in place between the forward and the backward pass (autograd raises if they were), and the z-loss output
carries no gradient of its own. As in every release, the gradients cannot be differentiated again.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays import compiled
from megacpp_overlays.feature_probes import liger_flce_none_backward as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Target, Thread, Verdict
from megacpp_overlays.source import SourceTree

_STATE = "megacpp_per_token"
"""Attribute of the autograd context that marks a forward pass as ours and holds what its backward pass needs."""

_KERNEL_OPTIONS = {
    "ignore_index": "ignore_index",
    "lse_square_scale": "lse_square_scale",
    "label_smoothing": "label_smoothing",
    "softcap": "softcap",
    "accum_dtype": "accum_dtype",
    "use_token_scaling": "token_scaling",
}
"""Options of the kernel by upstream's name. A release that lacks one computes as with the kernel's default."""


def _forward(
    gradient_required: Callable[[Mapping[str, Any]], bool],
) -> Callable[[Callable[..., Any], ModuleType], Callable[..., Any]]:
    """Return the maker of the forward seam.

    Args:
        gradient_required: whether this release fails, for these arguments, when the input has no gradient.
    """

    def make(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
        names, defaults = _signature(original)

        def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
            fits = len(args) + len(kwargs) == len({*names[: len(args)], *kwargs}) and given.keys() == set(names)
            if not fits or given["reduction"] != "none":
                return original(ctx, *args, **kwargs)  # which says what does not fit
            call = dict(given)
            for name in ("_input", "weight", "bias"):
                if call[name] is not None:
                    call[name] = call[name].detach()
            if gradient_required(given):
                call["_input"].requires_grad_()
            outputs = original(ctx, **call)
            _remember(ctx, names, given)
            return outputs

        return compiled.only_inlined(forward)

    return make


def _signature(original: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the parameter names after `ctx`, and the defaults."""
    after_ctx = list(inspect.signature(original).parameters.values())[1:]
    defaults = {p.name: p.default for p in after_ctx if p.default is not inspect.Parameter.empty}
    return tuple(p.name for p in after_ctx), defaults


def _remember(ctx: Any, names: tuple[str, ...], given: Mapping[str, Any]) -> None:
    """Leave in the context what the backward pass needs. This replaces the tensors that upstream saved there."""
    ctx.save_for_backward(*(given[name] for name in ("_input", "weight", "target", "bias", "ce_weight")))
    options = {ours: given[theirs] for theirs, ours in _KERNEL_OPTIONS.items() if theirs in given}
    setattr(ctx, _STATE, (names, options))


def _make_backward(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    from torch.autograd.function import once_differentiable

    from megacpp_overlays.kernels.linear_cross_entropy import linear_cross_entropy_gradients

    def per_token(ctx: Any, grad_output: Any) -> tuple[Any, ...]:
        names, options = getattr(ctx, _STATE)
        x, weight, target, bias, ce_weight = ctx.saved_tensors
        places = [names.index(name) for name in ("_input", "weight", "bias")]
        # Autograd lists only the arguments that were passed; the bias may have been left out.
        needs = tuple(place < len(ctx.needs_input_grad) and ctx.needs_input_grad[place] for place in places)
        found = linear_cross_entropy_gradients(
            x, weight, target, grad_output, bias=bias, ce_weight=ce_weight, needs=needs, **options
        )
        gradients: list[Any] = [None] * len(names)
        for place, gradient in zip(places, found, strict=True):
            gradients[place] = gradient
        return tuple(gradients)

    # Upstream's own decorator, so that autocast is in the backward pass what it was in the forward pass.
    per_token_gradients = module.amp_custom_bwd(once_differentiable(per_token))

    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if hasattr(ctx, _STATE):
            return per_token_gradients(ctx, grad_outputs[0])  # the other outputs are for logging and carry no gradient
        return original(ctx, *grad_outputs)

    return backward


def _witness(module: ModuleType) -> Observation:
    """Look at the loaded objects. Running upstream's backward pass would launch a kernel."""
    core = inspect.signature(getattr(module, feature.CORE_FORWARD)).parameters
    if "token_grad_output" in core:
        return Observation(broken=False, seen=f"{feature.CORE_FORWARD} takes token_grad_output")
    ours = getattr(module, feature.FUNCTION)
    exported = getattr(sys.modules.get("liger_kernel.ops"), feature.FUNCTION, ours)
    if exported is not ours:
        return Observation(broken=False, seen=f"liger_kernel.ops exports the one of {exported.__module__}")
    if _ascend_takes_over(module):
        return Observation(broken=False, seen="liger_kernel.ops will export the one of its Ascend backend")
    return Observation(broken=True, seen=f"{feature.CORE_FORWARD} has no token_grad_output")


def _ascend_takes_over(module: ModuleType) -> bool:
    """Return whether `liger_kernel.ops`, perhaps still being imported, is about to export its Ascend backend's own.

    Of the releases that can be repaired, 0.8.0 and 0.8.1 have such a backend for this operation, and no other.
    """
    infer_device: Callable[[], str] = getattr(module, "infer_device", lambda: "")
    own = Path(str(module.__file__))
    return (own.parent / "backends" / "_ascend" / "ops" / own.name).exists() and infer_device() == "npu"


def _self_test(module: ModuleType) -> Observation:
    """Run the backward pass that callers reach on four tokens, as our forward pass would leave them.

    Hidden size 1, two classes, weights (ln 3, 0): a token with hidden state x has probabilities
    3**x / (3**x + 1) and 1 / (3**x + 1). The first upstream gradient is 0 and the third token is ignored, so only
    the second and the fourth count: they give the logits (1.8, -1.8) and (-0.5, 0.5).
    """
    import torch

    def numbers(values: list[Any]) -> Any:
        return torch.tensor(values, dtype=torch.float32, device="cpu")

    function = getattr(module, feature.FUNCTION)
    names, defaults = _signature(function.forward)
    given = {
        **defaults,
        "_input": numbers([[1.0], [2.0], [1.0], [0.0]]),
        "weight": numbers([[math.log(3)], [0.0]]),
        "target": torch.tensor([0, 1, -100, 0], dtype=torch.int64, device="cpu"),
        "bias": numbers([0.0, 0.0]),
    }
    ctx = SimpleNamespace(needs_input_grad=[name in {"_input", "weight", "bias"} for name in names])
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    module.amp_custom_fwd(lambda _: None)(ctx)  # leaves what amp_custom_bwd reads
    _remember(ctx, names, given)
    gradients = function.backward(ctx, numbers([0.0, 2.0, 5.0, 1.0]), *[None] * (_outputs(module) - 1))

    expected = {
        "_input": [0.0, 1.8 * math.log(3), 0.0, -0.5 * math.log(3)],
        "weight": [3.6, -3.6],
        "bias": [1.3, -1.3],
    }
    if len(gradients) != len(names):
        return Observation(broken=True, seen=f"{len(gradients)} gradients for {len(names)} arguments")
    # Wide enough for an import that happens under autocast; one scale for all tokens is wrong by more than 1.
    wrong = [
        name
        for name, values in expected.items()
        if any(
            not math.isclose(seen, value, abs_tol=0.05)
            for seen, value in zip(gradients[names.index(name)].flatten().tolist(), values, strict=True)
        )
    ]
    seen = f"wrong gradients per token for {', '.join(wrong)}" if wrong else "each token is scaled by its own gradient"
    return Observation(broken=bool(wrong), seen=seen)


def _outputs(module: ModuleType) -> int:
    """Return how many outputs the function has: its backward pass takes as many gradients, after `ctx`."""
    return len(inspect.signature(getattr(module, feature.FUNCTION).backward).parameters) - 1


def _retired(tree: SourceTree) -> bool:
    return feature.probe(tree).verdict is Verdict.FIXED


def _seams(gradient_required: Callable[[Mapping[str, Any]], bool]) -> tuple[Replacement, ...]:
    return (
        Replacement(symbol=f"{feature.FUNCTION}.forward", make=_forward(gradient_required)),
        Replacement(symbol=f"{feature.FUNCTION}.backward", make=_make_backward),
    )


OVERLAY = Overlay(
    id="liger-flce-none-backward",
    pack=9,
    title='scale each token\'s gradient by its own upstream gradient when reduction="none"',
    target=Target(distribution="liger-kernel", module=feature.MODULE, symbol=feature.FUNCTION),
    probe=feature.probe,
    replacements={
        feature.DETACHED: _seams(lambda given: False),
        feature.BIAS_NEEDS_GRADIENT: _seams(lambda given: given["bias"] is not None),
        feature.INPUT_NEEDS_GRADIENT: _seams(lambda given: True),
    },
    unsupported={
        feature.SCALAR_NONE: (
            'reduction="none" returns the sum of the losses in this release, so there are no per-token losses to '
            "repair the gradients of; use liger-kernel 0.8.2 or newer"
        ),
        feature.REJECTED: (
            'this build refuses the backward pass of reduction="none" instead of getting it wrong; '
            "use liger-kernel 0.8.2 or newer"
        ),
    },
    witness=_witness,
    self_test=_self_test,
    breaks=(
        'with reduction="none", the gradients of the input, weight and bias are all scaled by the first '
        "token's upstream gradient"
    ),
    retire_when="every supported liger-kernel is 0.8.2 or newer",
    retired=_retired,
    threads=(
        Thread(repository="linkedin/Liger-Kernel", number=1298, state="merged 2026-07-30, in 0.8.2"),
        Thread(repository="linkedin/Liger-Kernel", number=1126, state="open draft"),
        Thread(repository="linkedin/Liger-Kernel", number=968, state="closed"),
        Thread(repository="linkedin/Liger-Kernel", number=872, state="closed"),
        Thread(repository="linkedin/Liger-Kernel", number=860, state="merged 2025-08-21, in 0.6.3"),
        Thread(repository="linkedin/Liger-Kernel", number=680, state="merged 2025-04-29, in 0.5.9"),
        Thread(repository="linkedin/Liger-Kernel", number=496, state="merged 2024-12-28, in 0.5.3"),
    ),
    last_validated=(
        "2026-11-21, H200, torch 2.11.0+cu130, triton 3.6.0, liger-kernel 0.5.3 to 0.8.5, and the same releases on "
        "x86-64 in the Triton interpreter"
    ),
)
