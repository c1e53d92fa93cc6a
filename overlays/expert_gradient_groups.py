"""Data parallel groups for gradients of experts that have their own tensor parallel size.

Without expert parallelism upstream treats these parameters like those of dense layers, whose data parallel ranks hold other shards, or other replicas. The seam marks
parameters of experts as upstream does with expert parallelism, when their layer gets its number, before gradients have buffers. Sizes that upstream
marks right are unchanged. Upstream marks all of them since #5916.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5916
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import expert_gradient_groups as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def set_layer_number(self: Any, layer_number: int) -> None:
        original(self, layer_number)
        sizes = self.config
        if (
            sizes.expert_model_parallel_size == 1
            and sizes.expert_tensor_parallel_size != sizes.tensor_model_parallel_size
        ):
            for each in self.experts.parameters():
                each.allreduce = False

    return set_layer_number


def _self_test(module: ModuleType) -> Observation:
    """Give layers their number whose experts have the tensor parallel size of the others, another one, and are parallel."""
    import torch

    marked = {}
    for of_layers, of_experts, experts in ((2, 2, 1), (2, 1, 1), (2, 1, 2)):
        sizes = {"tensor_model_parallel_size": of_layers, "expert_tensor_parallel_size": of_experts}
        layer = SimpleNamespace(
            config=SimpleNamespace(**sizes, expert_model_parallel_size=experts),
            router=SimpleNamespace(set_layer_number=lambda _: None),
            experts=torch.nn.ParameterList([torch.nn.Parameter(torch.empty(0))]),
        )
        getattr(module, feature.CLASS).set_layer_number(layer, 1)
        marked[of_layers, of_experts, experts] = not getattr(layer.experts[0], "allreduce", True)
    right = {(2, 2, 1): False, (2, 1, 1): True, (2, 1, 2): False}
    seen = "; ".join(f"sizes {', '.join(map(str, each))}: {found}" for each, found in marked.items())
    return Observation(
        broken=marked != right,
        seen=f"parameters of experts are marked, by sizes of layers, experts and of their groups: {seen}",
    )


OVERLAY = Overlay(
    id="expert-gradient-groups",
    pack=64,
    title="reduce gradients of experts over ranks that hold the same expert, where experts have a tensor parallel size of their own",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.UNMARKED: (Replacement(symbol=feature.TARGET.symbol, make=_make),)},
    unsupported={},
    witness=None,
    self_test=_self_test,
    opt_in=False,
    symptoms=(
        "experts do not specialise with expert_tensor_parallel_size and no expert parallelism",
        "replicas of experts differ between tensor parallel ranks",
    ),
    concerns="experts",
    breaks="with expert_model_parallel_size=1 and an expert_tensor_parallel_size of their own, gradients of experts are averaged over ranks that hold other shards of them, "
    "or not summed over all that hold the same",
    brief="gradients of experts with sizes of their own",
    until="linear layers mark such experts",
    retire_when="every supported megatron-core marks experts whose tensor parallel size is another one than that of layers",
    threads=(Thread(repository="NVIDIA/Megatron-LM", number=5916, state="merged 2026-07-25, released in 0.19.0"),),
    last_validated="2026-11-29, x86-64 without GPU, torch 2.11.0: megatron-core 0.13.1, 0.14.0, 0.15.3, 0.16.1, 0.18.2 and dev d48bd6be0a; 0.10.0 to 0.18.2 read",
)
