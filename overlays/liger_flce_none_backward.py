"""Gradients of fused linear cross entropy with `reduction="none"`, each token's scaled by its own upstream gradient.

Both passes are those of `megacpp_overlays.kernels`. The forward pass saves two or three numbers a token, and the
backward pass recomputes the logits block by block, or uses saved ones; see `kernels.linear_cross_entropy.memory`
for that choice. Every other reduction goes to upstream's own code in both passes.

The losses are upstream's to rounding, and more accurate: sums and the factor of token scaling are float32
here. The weight gradient is one product for each class, summed in float32, so `accum_dtype` is accepted and has no
effect. Nothing is read from the host, so a step can be captured in a CUDA graph.

Upstream's forward pass runs too, before ours and without gradients where the release can do that, in two cases:

- token accuracy or predicted tokens are asked for: all outputs are upstream's then. Five products instead of four.
- the arguments are unusual, so that upstream may refuse them with its own error.

The releases that are repaired compute their gradients in the forward pass, so writes between the passes
do not affect them. Here

- targets, bias and class weights are copied: a static or prefetch buffer may take the next batch before the backward pass.
- hidden states and the weight of the output layer are read again, as in liger-kernel 0.8.2, where gradients per token are
  upstream's own. Written in place between the passes they end in autograd's RuntimeError. A write through `.data` is not
  noticed: the gradients are those of the new values. A copy would take the memory that this loss exists to save.
- inference tensors are taken like any constant, where 0.8.2 refuses them. An output layer over hidden states from
  `torch.inference_mode` gets its gradient; the releases that are repaired leave it without one, or fail.

As in liger-kernel 0.8.2 the z-loss output carries no gradient of its own. As in every release, the gradients cannot be
differentiated again.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from megacpp_overlays.feature_probes import liger_flce_none_backward as feature
from megacpp_overlays.frozen import NamedTuple
from megacpp_overlays.kernels.linear_cross_entropy import liger
from megacpp_overlays.model import Observation, Overlay, Replacement, Target, Thread
from megacpp_overlays.runtime import dynamo

if TYPE_CHECKING:
    import torch

    from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory
    from megacpp_overlays.kernels.linear_cross_entropy.parallel import Terms

_STATE = "megacpp_per_token"
"""Attribute of the autograd context that marks a forward pass as ours."""


class _State(NamedTuple):
    """State of a forward pass for the backward pass, other than saved tensors."""

    names: tuple[str, ...]
    """Names of upstream's arguments; the backward pass returns one gradient for each."""
    terms: Terms
    memory: Memory
    input_dtype: torch.dtype
    kept: Any
    """Logits that wait for the first backward pass."""


def _forward(
    gradient_required: Callable[[Mapping[str, Any]], bool],
) -> Callable[[Callable[..., Any], ModuleType], Callable[..., Any]]:
    """Return the maker of the forward seam.

    Args:
        gradient_required: whether this release fails, for these arguments, when the input has no gradient.
    """

    def make(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
        names, defaults = liger.parameters(original, behind=1)  # ctx
        outputs = 1 + sum(name.startswith("return_") for name in names)
        compute = dynamo.untraced(_compute)

        def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            given = liger.named(names, defaults, args, kwargs)
            if given is None or given["reduction"] != "none":
                return original(ctx, *args, **kwargs)  # upstream raises for arguments that do not fit
            if _is_usual(given):
                losses, z_losses = compute(ctx, names, given)
                return losses, z_losses, *[None] * (outputs - 2)
            call = dict(given)
            for name in ("_input", "weight", "bias"):
                if call[name] is not None:
                    call[name] = call[name].detach()
            if gradient_required(given):
                call["_input"] = _requiring_gradient(call["_input"])
            theirs = original(ctx, **call)
            compute(ctx, names, given)  # this replaces the tensors that upstream saved
            return theirs

        return dynamo.only_inlined(forward)

    return make


def _requiring_gradient(x: torch.Tensor) -> torch.Tensor:
    """Return detached hidden states with `requires_grad` set; an inference tensor is copied, because it refuses the flag."""
    return (x.clone() if x.is_inference() else x).requires_grad_()


def _is_usual(given: Mapping[str, Any]) -> bool:
    """Return whether our forward pass computes everything that these arguments ask for.

    Raises:
        ValueError: there are fewer targets than tokens. Upstream reads past their end.
    """
    return liger.is_usual(given) and all(given.get(name, False) is False for name in liger.METRICS)


def _compute(
    ctx: Any, names: tuple[str, ...], given: Mapping[str, Any], memory: Memory | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run our forward pass, and save the backward pass's inputs in the context.

    Args:
        ctx: of autograd.
        names: of all arguments.
        given: their values.
        memory: None means the choice of the process.

    Returns:
        Losses and z-losses of the tokens, in upstream's dtypes; no z-losses if they were not asked for.
    """
    import torch

    from megacpp_overlays.kernels.linear_cross_entropy.memory import process_wide
    from megacpp_overlays.kernels.linear_cross_entropy.parallel import Group, forward_pass
    from megacpp_overlays.kernels.linear_cross_entropy.saved_tensors import private_copy, save

    memory = memory or process_wide()
    # Without grad mode the node still has needs_input_grad, but no next functions to send gradients to.
    comes_back = any(ctx.needs_input_grad) and bool(getattr(ctx, "next_functions", True))
    call = liger.understood(given)
    x, layer = given["_input"], call.layer
    with torch.autocast(x.device.type, enabled=False):
        found = forward_pass(call.rows, call.labels, layer, call.terms, Group(), memory, comes_back=comes_back)
    small = (given["bias"], call.labels, layer.class_weight)
    save(ctx, call.rows, layer.weight, *(map(private_copy, small) if comes_back else small), *found.statistics)
    setattr(ctx, _STATE, _State(names, call.terms, memory, x.dtype, found.kept))
    z_losses = liger.z_losses(found, given)
    return found.losses.float(), None if z_losses is None else z_losses.to(x.dtype)


def _make_backward(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    import torch
    from torch.autograd.function import once_differentiable

    from megacpp_overlays.kernels.linear_cross_entropy.parallel import Group, Layer, backward_pass
    from megacpp_overlays.kernels.linear_cross_entropy.saved_tensors import saved
    from megacpp_overlays.kernels.linear_cross_entropy.shard import GradientRequest
    from megacpp_overlays.kernels.vocabulary_softmax.numbers import Statistics

    @once_differentiable  # type: ignore[untyped-decorator]
    def per_token(ctx: Any, grad_output: Any) -> tuple[Any, ...]:
        state: _State = getattr(ctx, _STATE)
        rows, weight, bias, labels, ce_weight, *statistics = saved(ctx)
        places = [state.names.index(name) for name in ("_input", "weight", "bias")]
        # Autograd lists only the arguments that were passed; the bias may have been left out.
        needs = [place < len(ctx.needs_input_grad) and ctx.needs_input_grad[place] for place in places]
        layer = Layer(weight=weight, bias=liger.of_each_class(bias, weight), class_weight=ce_weight)
        with torch.autocast(rows.device.type, enabled=False):
            of_input, of_weight, of_bias = backward_pass(
                grad_output,
                rows,
                labels,
                Statistics(*statistics),
                layer,
                state.terms,
                Group(),
                state.memory,
                GradientRequest(hidden=needs[0], hidden_dtype=state.input_dtype, weight=needs[1], bias=needs[2]),
                kept=state.kept,
            )
        if of_bias is not None:
            of_bias = of_bias.expand(1, -1).sum_to_size(bias.shape)
        gradients: list[Any] = [None] * len(state.names)
        for place, gradient in zip(places, (of_input, of_weight, of_bias), strict=True):
            gradients[place] = gradient
        return tuple(gradients)

    gradients_per_token = dynamo.untraced(per_token)
    _, of_losses, *_ = inspect.signature(original).parameters

    def backward(ctx: Any, *grad_outputs: Any, **named: Any) -> Any:
        if hasattr(ctx, _STATE):
            # The other outputs are for logging and carry no gradient.
            return gradients_per_token(ctx, grad_outputs[0] if grad_outputs else named[of_losses])
        return original(ctx, *grad_outputs, **named)

    return backward


def _witness(module: ModuleType) -> Observation:
    """Inspect the loaded objects. Running upstream's backward pass would launch a kernel."""
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
    """Run the backward pass that callers reach on four tokens of our forward pass.

    Hidden size 1, two classes, weights (ln 3, 0): a token with hidden state x has probabilities
    3**x / (3**x + 1) and 1 / (3**x + 1). The first upstream gradient is 0 and the third token is ignored, so only
    the second and the fourth count: they give the logits (1.8, -1.8) and (-0.5, 0.5).

    In float64, which neither autocast nor Triton's interpreter affects, and without the choice of memory that
    the process makes when it trains.
    """
    import torch

    from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory

    def numbers(values: list[Any]) -> Any:
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    function = getattr(module, feature.FUNCTION)
    names, defaults = liger.parameters(function.forward, behind=1)
    given = {
        **defaults,
        "_input": numbers([[1.0], [2.0], [1.0], [0.0]]),
        "weight": numbers([[math.log(3)], [0.0]]),
        "target": torch.tensor([0, 1, -100, 0], dtype=torch.int64, device="cpu"),
        "bias": numbers([0.0, 0.0]),
    }
    ctx = SimpleNamespace(needs_input_grad=[name in {"_input", "weight", "bias"} for name in names])
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    with torch.no_grad():
        _compute(ctx, names, given, Memory())
    gradients = function.backward(ctx, numbers([0.0, 2.0, 5.0, 1.0]), *[None] * (_outputs(module) - 1))

    expected = {
        "_input": [0.0, 1.8 * math.log(3), 0.0, -0.5 * math.log(3)],
        "weight": [3.6, -3.6],
        "bias": [1.3, -1.3],
    }
    if len(gradients) != len(names):
        return Observation(broken=True, seen=f"{len(gradients)} gradients for {len(names)} arguments")
    # One scale for all tokens is wrong by more than 1.
    wrong = [
        name
        for name, values in expected.items()
        if any(
            not math.isclose(seen, value, abs_tol=1e-6)
            for seen, value in zip(gradients[names.index(name)].flatten().tolist(), values, strict=True)
        )
    ]
    seen = f"wrong gradients per token for {', '.join(wrong)}" if wrong else "each token is scaled by its own gradient"
    return Observation(broken=bool(wrong), seen=seen)


def _outputs(module: ModuleType) -> int:
    """Return the number of outputs of the function, which is the number of gradients that its backward pass takes after `ctx`."""
    return len(inspect.signature(getattr(module, feature.FUNCTION).backward).parameters) - 1


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
    },
    witness=_witness,
    self_test=_self_test,
    opt_in=False,
    symptoms=(
        "grad_norm is 0",
        "loss does not go down with Liger and token weights",
        "gradients are zero where the first tokens are masked",
        "reduction none gives wrong gradients in fused linear cross entropy",
    ),
    concerns="liger_loss",
    breaks=(
        'with reduction="none", the gradients of the input, weight and bias are all scaled by the first '
        "token's upstream gradient; with it, the hidden states and the output layer must not be written between the forward "
        "and the backward pass, as from liger-kernel 0.8.2 on (in place: an error; through `.data`: wrong gradients)"
    ),
    brief='gradients with reduction="none"',
    until="liger-kernel is 0.8.2 or newer",
    retire_when="every supported liger-kernel is 0.8.2 or newer",
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
        "2026-11-21, H200, torch 2.11.0+cu130, triton 3.6.0, liger-kernel 0.5.3, 0.7.0 and 0.8.1; 0.5.3 to 0.8.5 on "
        "x86-64 in the Triton interpreter"
    ),
)
