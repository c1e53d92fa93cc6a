"""Process groups that identify replicas of parameters, for child optimizers of Megatron's layer-wise optimizer.

After upstream's constructor, each optimizer without a tensor parallel group, or without that of experts, takes it from the process group
collection. Zeros are counted with both groups. A group that a caller has set stays. Upstream does the same since #6099.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6099
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import layerwise_norm_groups as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread

_GROUPS = ("tp_group", feature.REPLICAS)
"""Attributes of an optimizer: the tensor parallel groups of layers and of experts."""


def _make_constructor(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def __init__(self: Any, *arguments: Any, **more: Any) -> None:  # noqa: N807 - it takes the place of upstream's
        original(self, *arguments, **more)
        shared = getattr(self.pg_collection, "tp", None)
        groups = shared, getattr(self.pg_collection, "expt_tp", shared)
        for optimizer in (self, *self.chained_optimizers):
            for name, group in zip(_GROUPS, groups, strict=True):
                if getattr(optimizer, name, None) is None:
                    setattr(optimizer, name, group)

    return __init__


def _make_zeros(_original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def count_zeros(self: Any) -> Any:
        with module.torch.no_grad():
            return module.count_zeros_fp32(
                self.get_parameters(),
                grad_stats_parallel_group=None,
                use_decoupled_grad=self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                **{name: getattr(self, name, None) for name in _GROUPS},
            )

    return count_zeros


def observe(module: ModuleType) -> Observation:
    """Construct a layer-wise optimizer with two groups, and read those of its only child."""
    config = SimpleNamespace(overlap_param_gather=False, bf16=False)
    child = SimpleNamespace(config=config, param_groups=[])
    groups = SimpleNamespace(tp="of layers", expt_tp="of experts")
    getattr(module, feature.CLASS)([child], config, groups)
    found = tuple(getattr(child, name, None) for name in _GROUPS)
    return Observation(broken=found != (groups.tp, groups.expt_tp), seen=f"a child has the groups {found}")


OVERLAY = Overlay(
    id="layerwise-norm-groups",
    pack=54,
    title="count biases of all experts in the gradient norm of the layer-wise optimizer",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={
        feature.NO_GROUPS: (
            Replacement(symbol=feature.CONSTRUCTOR, make=_make_constructor),
            Replacement(symbol=feature.ZEROS, make=_make_zeros),
        )
    },
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "gradient norm is too small with a layer-wise optimizer (Muon) and biases of experts",
        "biases of experts are left out of the gradient norm",
        "num_zeros_in_grad leaves biases of experts out",
    ),
    concerns="experts and tensor_parallel and layer_wise",
    breaks="with a layer-wise optimizer (Muon), tensor parallelism and whole experts on each rank, the gradient norm has the biases of "
    "experts on the first rank alone, and gradients are clipped too little",
    retire_when="LayerWiseDistributedOptimizer gives its children the groups",
    brief="norms without biases of experts",
    until="children have the groups",
    threads=(Thread(repository="NVIDIA/Megatron-LM", number=6099, state="merged 2026-07-29, in no release"),),
    last_validated="2026-11-28, x86-64 without GPU, torch 2.11.0: megatron-core 0.19.0 and 0.19.2, and main d98e8a64dd and dev d48bd6be0a, "
    "which are right, on two gloo ranks",
)
