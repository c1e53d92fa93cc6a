"""Separate buckets for the gradients of each microbatch in Megatron-FSDP buffers of one rank.

Megatron-FSDP does not shard a gradient buffer whose data parallel group is one rank: each expert's where expert parallelism takes all data parallel ranks, and each parameter's of one rank.
Such a buffer is reduced and accumulated in every microbatch like a sharded one, but holds both the sum and the gradients to reduce.

Here it is used as its only shard: a microbatch has its own bucket, which is added to the buffer and freed, as with more ranks. Its gradients are scaled before
they are reduced, because NCCL applies no product on one rank. Strategies that shard no gradients, buffers of more ranks, and those that are sharded once more over outer data parallel ranks are upstream's.

Source: https://github.com/NVIDIA/Megatron-LM/issues/6660, https://github.com/NVIDIA/Megatron-LM/pull/6773
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import fsdp_lone_rank_gradients as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread

SHARDED = frozenset({"optim_grads", "optim_grads_params"})
"""Strategies under which each microbatch's gradients are reduced."""


class _OfOneRank(float):
    """Factor of gradients that one rank reduces."""


def _make_buffers(original: Callable[..., None], _module: ModuleType) -> Callable[..., None]:
    def _init_each_parameter_group_buffers(self: Any, *arguments: Any, **more: Any) -> None:
        original(self, *arguments, **more)
        settings = self.ddp_config
        if settings.data_parallel_sharding_strategy in SHARDED and settings.outer_dp_sharding_strategy == "no_shard":
            for group in self.parameter_groups:
                _shard(group.main_grad_buffer)

    return _init_each_parameter_group_buffers


def _shard(buffer: Any) -> None:
    """Let a gradient buffer of one rank, or None, be the only shard; its size and its indices are the same."""
    if buffer is None or buffer.is_data_distributed or buffer.dp_world_size != 1:
        return
    buffer.is_data_distributed = True
    if buffer.gradient_scaling_factor is not None:
        buffer.gradient_scaling_factor = _OfOneRank(buffer.gradient_scaling_factor)


def _make_scale(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def gradient_reduce_preprocessing(
        grad_data: Any, scaling_factor: Any, ddp_config: Any, *arguments: Any, **more: Any
    ) -> Any:
        if not isinstance(scaling_factor, _OfOneRank):
            return original(grad_data, scaling_factor, ddp_config, *arguments, **more)
        grad_data.mul_(float(scaling_factor))
        return module.torch.distributed.ReduceOp.SUM

    return gradient_reduce_preprocessing


def observe(module: ModuleType) -> Observation:
    """Ask how gradients of one rank are scaled by a half; a buffer needs process groups, which are not there yet."""
    import torch

    with torch.inference_mode(False), torch.no_grad():
        gradients = torch.ones(1, dtype=torch.float32, device="cpu")
        settings = SimpleNamespace(average_in_collective=False, gradient_reduce_div_fusion=True)
        getattr(module, feature.SCALE)(gradients, _OfOneRank(0.5), settings)
    left = gradients.item()
    return Observation(
        broken=left != 0.5, seen=f"a gradient of 1 that one rank reduces is {left} where it is to be halved"
    )


OVERLAY = Overlay(
    id="fsdp-lone-rank-gradients",
    pack=56,
    title="accumulate Megatron-FSDP's gradients of one rank apart from the gradients that are reduced",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={
        feature.IN_PLACE: (
            Replacement(symbol=feature.TARGET.symbol, make=_make_buffers),
            Replacement(symbol=feature.SCALE, make=_make_scale),
        )
    },
    unsupported={},
    witness=None,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "gradients double with each microbatch under Megatron-FSDP",
        "grad norm is inf under Megatron-FSDP with expert parallelism",
        "experts learn too much, or from the last microbatch alone, when EP equals DP under Megatron-FSDP",
        "gradients depend on the number of microbatches under Megatron-FSDP",
    ),
    concerns="megatron_fsdp",
    breaks="under Megatron-FSDP (optim_grads, optim_grads_params) with several microbatches, gradients of which one rank has all are wrong, those of experts where "
    "expert parallelism takes all data parallel ranks: doubled in each microbatch, scaled anew in each, or not scaled",
    retire_when="gradients that one rank reduces are scaled once, and added to those of earlier microbatches once",
    brief="FSDP gradients that one rank reduces",
    until="they are added up once",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=6660, state="closed"),
        Thread(
            repository="NVIDIA/Megatron-LM", number=6773, state="merged, in no release; scales gradients of one rank"
        ),
    ),
    last_validated="2026-11-28, x86-64 without GPU, torch 2.11.0: megatron-core 0.16.1, 0.18.2, 0.19.2, main d98e8a64dd and dev d48bd6be0a, on gloo ranks",
)
