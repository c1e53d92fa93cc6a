"""Backward pass of Liger's norms of GLM-4V without an in-place write to the gradient of the output.

By default the backward pass of Liger's norm overwrites the gradient of its output. Where the output is added to a residual, that tensor is also the gradient of the residual.
Norms of a model to which kernels are applied allocate the gradient of their input, as norms of models do that are built with Liger's classes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from megacpp_overlays.feature_probes import liger_glm4v_norms as feature
from megacpp_overlays.model import Observation, Overlay, Replacement

_NORMS = {"Glm4vRMSNorm", "LigerRMSNormForGlm4"}
"""Classes of transformers and of Liger; the second is that of models which are built once Liger's classes are in."""


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def _patch_rms_norm_module(module: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(module, *args, **kwargs)
        for each in getattr(module, "modules", tuple)():  # a wrapper of PEFT has two
            names = {kind.__name__ for kind in type(each).__mro__}
            if names & _NORMS and getattr(each, "in_place", False) is True:
                each.in_place = False
        return found

    return _patch_rms_norm_module


def _self_test(module: ModuleType) -> Observation:
    """Apply the kernel to a norm of GLM-4V and to one of another model."""
    import torch

    found = {}
    for name in ("Glm4vRMSNorm", "RMSNorm"):
        norm = type(name, (torch.nn.Module,), {})()
        getattr(module, feature.TARGET.symbol)(norm)
        found[name] = norm.in_place
    seen = f"norms write into gradients that they get: {found}"
    return Observation(broken=found != {"Glm4vRMSNorm": False, "RMSNorm": True}, seen=seen)


OVERLAY = Overlay(
    id="liger-glm4v-norms",
    pack=63,
    title="let norms of GLM-4V leave gradients alone that residuals share, where Liger's kernels are applied to a model",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.IN_PLACE: (Replacement(symbol=feature.TARGET.symbol, make=_make),)},
    unsupported={},
    witness=None,
    self_test=_self_test,
    opt_in=False,
    symptoms=(
        "gradients of GLM-4V explode with `use_liger_kernel`, and the loss is right",
        "GLM-4.1V does not train with Liger, grad_norm is far larger than without",
    ),
    concerns="liger_loss",
    breaks="gradients of a GLM-4V model to which Liger's kernels are applied, as with `use_liger_kernel=True`, are wrong; its loss is right",
    brief="gradients of GLM-4V",
    until="Liger lets these norms write elsewhere",
    retire_when="every supported liger-kernel passes in_place=False for norms of GLM-4V before a sum",
    threads=(),
    last_validated="2026-11-29, x86-64 in the Triton interpreter, torch 2.11.0 and 2.15.0, transformers 5.23.0: liger-kernel 0.6.5 to 0.8.5 and main ead96b61; 0.6.2 to 0.6.4 read",
)
