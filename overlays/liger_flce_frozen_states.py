"""Gradients of the output layer in Liger's fused linear cross entropy where hidden states need none.

The loss computes gradients of weights and biases in its forward pass, and only where hidden states need one. With grad mode on, and weights or a bias that
learn, the callers now pass hidden states that need a gradient: a detached view of them, whose own gradient is dropped with the graph. Evaluation,
`reduction="none"`, and hidden states or layers that upstream handles right, are left to upstream.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from megacpp_overlays.feature_probes import liger_flce_frozen_states as feature
from megacpp_overlays.kernels.linear_cross_entropy import liger
from megacpp_overlays.model import Observation, Overlay, Replacement, Target
from megacpp_overlays.runtime import dynamo
from megacpp_overlays.runtime.in_this_thread import Instead, answer

if TYPE_CHECKING:
    import torch

_LOSS = "LigerFusedLinearCrossEntropyFunction"


def _make_function(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    names, defaults = liger.parameters(original)
    learnable = dynamo.untraced(_learnable)

    def liger_fused_linear_cross_entropy(*args: Any, **kwargs: Any) -> Any:
        given = liger.named(names, defaults, args, kwargs)
        if given is None or not _learns_alone(given["input"], given["weight"], given["bias"], given["reduction"]):
            return original(*args, **kwargs)  # upstream raises for arguments that do not fit
        return original(**{**given, "input": learnable(given["input"])})

    return liger_fused_linear_cross_entropy


def _make_forward(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    names, defaults = liger.parameters(original, behind=1)  # self
    learnable = dynamo.untraced(_learnable)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = liger.named(names, defaults, args, kwargs)
        if given is None or not _learns_alone(given["_input"], given["lin_weight"], given["bias"], self.reduction):
            return original(self, *args, **kwargs)
        return original(self, **{**given, "_input": learnable(given["_input"])})

    return forward


def _learns_alone(states: Any, weight: Any, bias: Any, reduction: str) -> bool:
    """Return whether an output layer learns from hidden states that want no gradient."""
    import torch

    layer = [each for each in (weight, bias) if isinstance(each, torch.Tensor)]
    is_constant = isinstance(states, torch.Tensor) and states.is_floating_point() and not states.requires_grad
    return reduction != "none" and is_constant and any(each.requires_grad for each in layer) and torch.is_grad_enabled()


def _learnable(states: torch.Tensor) -> torch.Tensor:
    """Return hidden states that need a gradient: a view, or a copy of an inference tensor, which refuses to need one."""
    return (states.clone() if states.is_inference() else states.detach()).requires_grad_()


def _self_test(target: Target, module: ModuleType) -> Observation:
    """Hand four kinds of hidden states and layers over, and look at which hidden states reach the loss with a gradient to compute."""
    import torch

    asked: list[bool] = []

    states, weight = (torch.ones(1, 1, device="cpu") for _ in range(2))
    labels = torch.zeros(1, dtype=torch.int64, device="cpu")
    theirs = vars(module)[_LOSS]
    outputs = len(inspect.signature(theirs.backward).parameters) - 1  # ctx

    def apply(states: Any, *_: Any) -> tuple[None, ...]:
        asked.append(states.requires_grad)
        return (None,) * outputs

    vars(module)[_LOSS] = Instead(theirs, apply=answer(apply, theirs.apply))
    try:
        for learns, wants, evaluates in (
            (True, False, False),
            (False, False, False),
            (True, True, False),
            (True, False, True),
        ):
            given = states.clone().requires_grad_(wants), weight.clone().requires_grad_(learns)
            with torch.set_grad_enabled(not evaluates):
                _call(module, target, *given, labels)
    finally:
        vars(module)[_LOSS] = theirs
    return Observation(
        broken=asked != [True, False, True, False], seen=f"hidden states that need a gradient, of four: {asked}"
    )


def _call(module: ModuleType, target: Target, states: Any, weight: Any, labels: Any) -> None:
    name, _, method = target.symbol.partition(".")
    if not method:
        getattr(module, name)(states, weight, labels)
        return
    of_instance = dict.fromkeys(("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), False)
    instance = _Unset(reduction="mean", **of_instance)
    getattr(getattr(module, name), method)(instance, weight, states, labels)


class _Unset(SimpleNamespace):
    """An instance whose further attributes are None."""

    def __getattr__(self, name: str) -> None:
        return None


def _part(target: Target, probe: Callable[..., Any], make: Callable[..., Any]) -> Overlay:
    return Overlay(
        id="liger-flce-frozen-states",
        pack=58,
        title="let an output layer learn from hidden states that want no gradient, in Liger's fused linear cross entropy",
        target=target,
        probe=probe,
        replacements={feature.SKIPPED: (Replacement(symbol=target.symbol, make=make),)},
        unsupported={},
        witness=None,
        self_test=lambda module: _self_test(target, module),
        opt_in=False,
        symptoms=(
            "a head that is trained on a frozen model does not learn with Liger",
            "lm_head.weight.grad is None with `use_liger_kernel`",
            "'NoneType' object has no attribute 'detach' in fused_linear_cross_entropy",
        ),
        concerns="liger_loss",
        breaks="an output layer over hidden states that want no gradient, as of a frozen model, gets none with a mean or a sum and does not learn; "
        "liger-kernel 0.6.3, and 0.6.4 to 0.7.0 with a bias, raise instead",
        brief="a head on a frozen model",
        until="the loss asks weights and biases themselves",
        retire_when="every supported liger-kernel computes gradients of weights and biases whatever hidden states want",
        threads=(),
        last_validated="2026-11-28, x86-64 in the Triton interpreter, torch 2.11.0, triton 3.6.0: liger-kernel 0.6.3 to 0.8.5",
    )


PARTS = (
    _part(feature.FUNCTION, feature.probe, _make_function),
    _part(feature.MODULE, feature.probe_module, _make_forward),
)
