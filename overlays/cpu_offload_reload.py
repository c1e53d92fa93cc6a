"""Refresh of an offloaded optimizer's weight copies after weights are loaded into its model.

Upstream's method returns early for a hybrid optimizer. The seam runs it once more as for any other optimizer, which copies the model's
weights to main weights. Then it refreshes every copy that the hybrid optimizer steps from. A second run changes nothing, and moments
stay as they are.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5071
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import cpu_offload_reload as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread

_FSDP = ("use_megatron_fsdp", "use_custom_fsdp")
"""Settings under which Megatron-FSDP, and not the optimizer, owns main weights."""
_AWARE = ("use_precision_aware_optimizer", "use_precision_aware_optimizer_no_fp8_or_ds_fp8")
"""Settings under which the optimizer steps from weights of the model."""


def _make(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    import torch

    def _copy_model_params_to_main_params(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        hybrid = self.optimizer
        if not isinstance(hybrid, module.HybridDeviceOptimizer) or any(
            getattr(self.ddp_config, each, False) for each in _FSDP
        ):
            return
        self.optimizer = None
        try:
            original(self, *args, **kwargs)
        finally:
            self.optimizer = hybrid
        with torch.no_grad():
            for given, inner in hybrid.param_to_inner_param.items():
                if inner is not given:
                    inner.data.copy_(given.data)

    return _copy_model_params_to_main_params


def observe(module: ModuleType) -> Observation:
    """Load a weight into a model whose optimizer steps from a copy of the main weight; read both."""
    import torch

    model, main, inner = (torch.full((1,), value, device="cpu") for value in (1.0, 7.0, 7.0))
    hybrid = object.__new__(module.HybridDeviceOptimizer)
    vars(hybrid).update(
        param_to_inner_param={main: inner}, param_to_fp32_param={}, gpu_params_map_cpu_copy={main: inner}
    )
    optimizer = object.__new__(getattr(module, feature.CLASS))
    vars(optimizer).update(
        optimizer=hybrid,
        is_stub_optimizer=True,
        ddp_config=SimpleNamespace(**dict.fromkeys(_FSDP, False)),
        config=SimpleNamespace(**dict.fromkeys(_AWARE, False)),
        model_float16_groups=[[model]],
        shard_fp32_from_float16_groups=[[main]],
        model_fp32_groups=[],
        shard_fp32_groups=[],
        _get_model_param_range_map=lambda _: {"param": SimpleNamespace(start=0, end=1, size=1)},
    )
    getattr(optimizer, feature.METHOD.rpartition(".")[2])()
    found = main.item(), inner.item()
    return Observation(broken=found != (1.0, 1.0), seen=f"of a loaded weight of 1 main weight and copy are {found}")


OVERLAY = Overlay(
    id="cpu-offload-reload",
    pack=51,
    title="let an offloaded optimizer step from the weights that were loaded into its model",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.STALE: (Replacement(symbol=feature.METHOD, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "loss jumps in the first step after loading pretrained weights with CPU offload",
        "the first optimizer step after loading weights goes back to random initialisation",
        "pretrained weights are lost with `optimizer_cpu_offload`",
    ),
    concerns="optimizer_offload and distributed_optimizer",
    breaks="the first step of an offloaded optimizer after weights were loaded without its state starts from the weights before, "
    "such as random initialisation, unless it is precision-aware",
    brief="weights loaded under offloading",
    until="copies are refreshed",
    retire_when="DistributedOptimizer refreshes main weights and copies of a HybridDeviceOptimizer",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=5071, state="open, opened 2026-05-30: a repair"),
        Thread(
            repository="NVIDIA-NeMo/Megatron-Bridge",
            number=4082,
            state="merged, opened 2026-05-29: refreshes copies itself",
        ),
    ),
    last_validated="2026-11-27, x86-64 without GPU, torch 2.11.0: megatron-core 0.12.0, 0.13.1, 0.16.1, 0.18.2 and 0.19.2, and main "
    "d98e8a64dd; 0.12.0 to 0.19.2 read; dev d48bd6be0a is broken and a conflict",
)
