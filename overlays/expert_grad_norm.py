"""Gradient norms and counts of zeros with expert parameters counted on every tensor parallel rank that does not share them.

A parameter of experts is one whose gradient is reduced over the data parallel ranks of experts (`allreduce` is False). With
`expert_tensor_parallel_size=1` no two tensor parallel ranks have the same one in the groups over which norms are added up. Copies that an optimizer
keeps, in fp32 or of one part, get `allreduce` from their parameter. All other parameters, all other sizes, and groups that a caller made are
upstream's. Since #5916 upstream uses the group of ranks that share an expert instead.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5916
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import expert_grad_norm as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread


def _is_expert(param: Any) -> bool:
    return not getattr(param, "allreduce", True)


def _holds_whole_experts(states: Any, group: Any) -> bool:
    """Return whether each tensor parallel rank of this process has experts of its own; of a group that a caller made this is not known."""
    own = states.get_tensor_model_parallel_group(check_initialized=False)
    return (group is None or group is own) and states.get_expert_tensor_parallel_world_size() == 1


def _make_test(original: Callable[..., bool], _module: ModuleType) -> Callable[..., bool]:
    def param_is_not_tensor_parallel_duplicate(param: Any, *arguments: Any, **more: Any) -> bool:
        from megatron.core import parallel_state as states

        group = more.get("tp_group", arguments[0] if arguments else None)
        return (_is_expert(param) and _holds_whole_experts(states, group)) or original(param, *arguments, **more)

    return param_is_not_tensor_parallel_duplicate


def _make_copy(original: Callable[..., None], _module: ModuleType) -> Callable[..., None]:
    def copy_tensor_model_parallel_attributes(destination_tensor: Any, source_tensor: Any) -> None:
        original(destination_tensor, source_tensor)
        if _is_expert(source_tensor) and not hasattr(destination_tensor, "allreduce"):
            destination_tensor.allreduce = source_tensor.allreduce

    return copy_tensor_model_parallel_attributes


def observe(module: ModuleType) -> Observation:
    """Copy the attributes of a parameter of experts; whether it is counted depends on groups, which this process may not have yet."""
    copied = SimpleNamespace()
    getattr(module, feature.COPY)(copied, SimpleNamespace(allreduce=False))
    is_known = _is_expert(copied)
    return Observation(
        broken=not is_known, seen=f"a copy of a parameter of experts is {'' if is_known else 'not '}known to be one"
    )


OVERLAY = Overlay(
    id="expert-grad-norm",
    pack=55,
    title="count every expert in the gradient norm where tensor parallel ranks do not share them",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={
        feature.BY_LAYER: (
            Replacement(symbol=feature.TEST, make=_make_test),
            Replacement(symbol=feature.COPY, make=_make_copy),
        )
    },
    unsupported={},
    witness=None,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "gradient norm is too small with expert_tensor_parallel_size=1 and tensor parallelism",
        "gradient norm of a mixture of experts depends on the tensor parallel size",
        "replicas of experts drift apart with expert_tensor_parallel_size=1 and tensor parallelism",
        "num_zeros_in_grad counts the experts of the first tensor parallel rank alone",
    ),
    concerns="experts and tensor_parallel",
    breaks="with tensor parallelism and whole experts on each rank (`expert_tensor_parallel_size=1`) the gradient norm has biases of experts, and "
    "weights of grouped linear layers of newer Transformer Engines, from the first tensor parallel rank alone: gradients are clipped too little, and replicas "
    "of an expert by different norms",
    retire_when="optimizers pass the expert tensor parallel group to the filter of replicas",
    brief="norms without experts of other ranks",
    until="optimizers pass the expert tensor parallel group",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=5916, state="merged 2026-07-25, released in 0.19.0"),
        Thread(repository="NVIDIA/Megatron-LM", number=6470, state="closed, ports it to dev"),
    ),
    last_validated="2026-11-28, x86-64 without GPU, torch 2.11.0: megatron-core 0.16.1 and 0.18.2, and 0.19.2 and main d98e8a64dd, which are right, "
    "and dev d48bd6be0a, on two and four gloo ranks",
)
