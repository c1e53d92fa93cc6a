"""Z-loss of a repeated multi-token prediction layer, divided by the number of predictions.

With `mtp_use_repeated_layer` a router's `apply_z_loss` runs once for each prediction, and divides the loss by their number after it has
attached it to the logits: logs are right, and gradients are too large by a factor of the number of predictions.

Upstream's method runs with a coefficient that is divided by that number. It multiplies the loss by the coefficient, and divides the logged
value by it, so gradients are right and logs are unchanged, up to rounding. Every other router runs upstream's method unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import mtp_z_loss as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.bare_instances import bare
from megacpp_overlays.runtime.in_this_thread import Instead


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def apply_z_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        coefficient, predictions = config.moe_z_loss_coeff, config.mtp_num_layers
        if not (self.is_mtp_layer and config.mtp_use_repeated_layer and predictions and coefficient):
            return original(self, *args, **kwargs)
        divided = Instead(config, moe_z_loss_coeff=coefficient / predictions)
        return original(Instead(self, config=divided), *args, **kwargs)

    return apply_z_loss


_PREDICTIONS = 2
_ENOUGH = 1e-6


def observe(module: ModuleType) -> Observation:
    """Run the real method on the CPU, for a layer of two predictions and for one of the decoder, and read the attached loss."""
    import torch

    found = {}
    with torch.inference_mode(False), torch.enable_grad():
        for predicts in (True, False):
            logits = torch.zeros(1, 1, dtype=torch.float32, device="cpu").add(2.0).requires_grad_()
            router = bare(
                getattr(module, feature.ROUTER),
                config=SimpleNamespace(
                    moe_z_loss_coeff=0.5, num_layers=1, mtp_num_layers=_PREDICTIONS, mtp_use_repeated_layer=True
                ),
                training=True,
                calculate_per_token_loss=False,
                is_mtp_layer=predicts,
                layer_number=None if not predicts else _NoPlace(),
                tp_cp_group=SimpleNamespace(size=lambda: 1),
                tp_dp_cp_group=None,
            )
            attached = router.apply_z_loss(logits)
            (loss,) = attached.grad_fn.saved_tensors
            found[predicts] = float(loss.detach())
    expected = {True: 2.0 / _PREDICTIONS, False: 2.0}
    return Observation(
        broken=any(abs(found[each] - expected[each]) > _ENOUGH for each in found),
        seen=f"the z-loss of one of {_PREDICTIONS} predictions is {found[True]:.4f}, that of a layer {found[False]:.4f}",
    )


class _NoPlace:
    """Layer number whose sum with another number is None, so that no loss is logged."""

    def __add__(self, _other: object) -> None:
        return None


OVERLAY = Overlay(
    id="mtp-z-loss",
    pack=30,
    title="divide the z-loss of a layer that is used for several predictions by their number before it is attached",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.AFTERWARDS: (Replacement(symbol=feature.METHOD, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "z-loss is too strong with MTP",
        "MoE z-loss grows with the number of predictions, with mtp_use_repeated_layer",
    ),
    concerns="experts and z_loss and repeated_mtp",
    breaks="gradients of the z-loss of a prediction layer that is used several times count once for each use",
    retire_when="apply_z_loss divides by mtp_num_layers before it attaches the loss",
    brief="z-losses of repeated MTP layers",
    until="apply_z_loss divides before",
    threads=(
        Thread(
            repository="NVIDIA/Megatron-LM", number=6748, state="merged 2026-08-21: a comment says so, in no release"
        ),
        Thread(repository="NVIDIA/Megatron-LM", number=5087, state="merged: dev divides before, in no release"),
    ),
    last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.17.1, 0.18.2 and 0.19.2 and main d98e8a64dd; 0.17.0 to "
    "0.19.2 and dev d48bd6be0a read. H200: 0.19.2",
)
