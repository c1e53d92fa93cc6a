"""Flag `is_mtp_layer` on MoE layers for multi-token prediction in Megatron's hybrid model.

With `mtp_use_repeated_layer` one layer makes all predictions. Its router divides its balancing loss by their number if `is_mtp_layer`
is set, but the hybrid model's stack passes the flag to attention layers and not to MoE layers. So the loss counts once for each
prediction. With one layer for each prediction, or with one for all, it is logged for a layer of the decoder.

The constructor runs unchanged, and the flag is set on the layers that it made. Upstream's logs have an entry for each prediction, and
a layer's number in the pattern may be greater. It is clamped to the last entry then, as on dev. Upstream's own repair on main ends
in an IndexError there. Stacks of the decoder are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import hybrid_mtp_aux_loss as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread


def _make(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes a constructor
        original(self, *args, **kwargs)
        if self.is_mtp_layer:
            for kind, layer in zip(self.layer_type_list, self.layers, strict=True):
                if kind == module.LayerSymbols.MOE:
                    _tell(layer, self.config.mtp_num_layers)

    return __init__


def _tell(layer: Any, predictions: int | None) -> None:
    """Set the flag on all submodules of a layer that have it, and clamp the layer numbers of its routers to entries of the logs."""
    for part in layer.modules():
        if getattr(part, "is_mtp_layer", None) is False:
            part.is_mtp_layer = True
        logs = hasattr(part, "attach_and_log_load_balancing_loss") and getattr(part, "layer_number", None) is not None
        if logs and predictions is not None:
            part.layer_number = min(part.layer_number, predictions)


def witness(module: ModuleType) -> Observation:
    """Read the flags of two MoE layers that the real stack makes for a prediction."""
    found = _made(module, predicts=True)
    return Observation(
        broken=[flag for flag, _ in found] != [True, True],
        seen=f"is_mtp_layer of the MoE layers of a prediction: {[flag for flag, _ in found]}",
    )


def self_test(module: ModuleType) -> Observation:
    """Read the flags and layer numbers of MoE layers of one prediction and of the decoder."""
    found = {predicts: _made(module, predicts=predicts) for predicts in (True, False)}
    right = found == {True: [(True, 1), (True, 1)], False: [(False, 1), (False, 2)]}
    return Observation(
        broken=not right,
        seen=f"is_mtp_layer and layer number of MoE layers: for one prediction {found[True]}, for the decoder {found[False]}",
    )


def _made(module: ModuleType, *, predicts: bool) -> list[tuple[bool, int]]:
    """Let a stack make two layers of recording stubs; return the flag and the number of each."""
    import torch
    from megatron.core.transformer.spec_utils import ModuleSpec

    class BuiltLayer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, *, layer_number: int, is_mtp_layer: bool = False, **_: Any) -> None:
            super().__init__()
            self.layer_number, self.is_mtp_layer = layer_number, is_mtp_layer

        def attach_and_log_load_balancing_loss(self) -> None:
            """Mark the stub as a router, which has this method."""

    moe = module.LayerSymbols.MOE
    stack = module.HybridStack(
        config=_BlockConfig(mtp_num_layers=1),
        submodules=SimpleNamespace(moe_layer=ModuleSpec(module=BuiltLayer)),
        layer_type_list=[moe, moe],
        post_layer_norm=False,
        pg_collection=SimpleNamespace(pp=None, tp=None),
        is_mtp_layer=predicts,
    )
    return [(each.is_mtp_layer, each.layer_number) for each in stack.layers]


class _BlockConfig(SimpleNamespace):
    """Config whose missing attributes are None."""

    def __getattr__(self, name: str) -> None:
        return None


OVERLAY = Overlay(
    id="hybrid-mtp-aux-loss",
    pack=30,
    title="mark the MoE layers of a hybrid model's multi-token prediction as such",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.NOT_TOLD: (Replacement(symbol=feature.CONSTRUCTOR, make=_make),)},
    unsupported={},
    witness=witness,
    self_test=self_test,
    opt_in=False,
    symptoms=(
        "load balancing loss is too large in a hybrid model with MTP",
        "aux loss of the last decoder layer is too high in the log",
    ),
    concerns="hybrid and mtp and experts",
    breaks="the balancing loss of a hybrid model's repeated prediction layer counts once for each prediction, and is logged for "
    "a layer of the decoder",
    retire_when="HybridStack marks the MoE layers that it makes for multi-token prediction",
    brief="MoE losses of hybrid MTP layers",
    until="HybridStack marks these MoE layers",
    threads=(Thread(repository="NVIDIA/Megatron-LM", number=6748, state="merged 2026-08-21, in no release"),),
    last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.18.2 and 0.19.2; 0.18.0 to 0.19.2, main d98e8a64dd "
    "and dev d48bd6be0a read. H200: 0.19.2",
)
