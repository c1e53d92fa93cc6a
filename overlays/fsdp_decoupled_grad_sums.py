"""Sums over tensor parallel ranks of gradients of replicas that Megatron-FSDP keeps in `decoupled_grad` for a precision-aware optimizer.

Upstream sums gradients of norms under sequence parallelism, of query and key norms, and of router and shared-expert gates. One function returns the name of the attribute
with the gradient. For a parameter of Megatron-FSDP that has a `decoupled_grad`, it returns this name here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import fsdp_decoupled_grad_sums as feature
from megacpp_overlays.model import Observation, Overlay, Replacement

_DECOUPLED = "decoupled_grad"
_OF_FSDP = "__fsdp_param__"
"""Mark of parameters that Megatron-FSDP manages."""


def _make(original: Callable[..., str], _module: ModuleType) -> Callable[..., str]:
    def _get_main_grad_attr(param: Any, *args: Any, **kwargs: Any) -> str:
        if getattr(param, _OF_FSDP, False) and getattr(param, _DECOUPLED, None) is not None:
            return _DECOUPLED
        return original(param, *args, **kwargs)

    return _get_main_grad_attr


def observe(module: ModuleType) -> Observation:
    """Ask for the attribute of parameters of Megatron-FSDP with such a gradient and without, and of one of another wrapper."""
    asked = {
        _DECOUPLED: SimpleNamespace(**{_OF_FSDP: True, _DECOUPLED: 1.0, "grad": None}),
        "grad": SimpleNamespace(**{_OF_FSDP: True, _DECOUPLED: None, "grad": 1.0}),
        "main_grad": SimpleNamespace(**{_DECOUPLED: 1.0, "main_grad": 1.0, "grad": None}),
    }
    found = {right: getattr(module, feature.TARGET.symbol)(each) for right, each in asked.items()}
    seen = ", ".join(f"{each} where {right} is right" for right, each in found.items())
    return Observation(
        broken=any(right != each for right, each in found.items()), seen=f"gradients are taken from {seen}"
    )


OVERLAY = Overlay(
    id="fsdp-decoupled-grad-sums",
    pack=66,
    title="sum gradients of replicas over tensor parallel ranks under Megatron-FSDP with a precision-aware optimizer",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.OVERLOOKED: (Replacement(symbol=feature.TARGET.symbol, make=_make),)},
    unsupported={},
    witness=None,  # upstream may repair it where gradients are kept
    self_test=observe,
    opt_in=False,
    symptoms=(
        "norms of tensor parallel ranks drift apart under Megatron-FSDP with `use_precision_aware_optimizer`",
        "Megatron-FSDP with tensor parallelism trains otherwise with a precision-aware optimizer",
    ),
    concerns="megatron_fsdp and tensor_parallel",
    breaks="under Megatron-FSDP with `use_precision_aware_optimizer` gradients of norms and other replicas are not summed over tensor parallel ranks, so each rank learns from its own part",
    retire_when="finalize_model_grads sums decoupled_grad of Megatron-FSDP's parameters",
    brief="FSDP sums over TP ranks",
    until="finalize_model_grads finds these gradients",
    threads=(),
    last_validated="2026-11-29, x86-64 without GPU, torch 2.11.0: megatron-core 0.18.2 and 0.19.2, main d98e8a64dd and dev d48bd6be0a, on two gloo ranks; 0.18.0 to 0.19.2 read",
)
