"""Accumulation of weight gradients over microbatches by fused layers under Megatron-FSDP, where gradients are not sharded.

With fused accumulation of weight gradients Transformer Engine's layers write to `main_grad`, and overwrite it if a parameter has `overwrite_main_grad`. Megatron-FSDP sets this flag for all strategies whenever weights are gathered, but only sharded
gradients leave the buffer after each microbatch. Here the flag is cleared for the others afterwards, as upstream does since #6357.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6357
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import fsdp_fused_accumulation as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread

_SHARDED = ("optim_grads", "optim_grads_params")
"""Strategies under which each microbatch has the buffer to itself."""


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def all_gather_and_wait_parameters_ready(self: Any, params: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        gathered = [*params]
        found = original(self, gathered, *args, **kwargs)
        if self.data_parallel_sharding_strategy not in _SHARDED:
            for each in gathered:
                each.overwrite_main_grad = False
        return found

    return all_gather_and_wait_parameters_ready


def observe(module: ModuleType) -> Observation:
    """Gather a weight, with gradients sharded and not, and see whether its layer is to write over its gradient."""
    import torch

    asked = getattr(getattr(module, feature.CLASS), feature.METHOD)
    found = {}
    for strategy in ("optim", _SHARDED[0]):
        weight = torch.empty(0, device="cpu")
        asked(_whole(strategy), [weight], prefetch=False, wait_bucket_ready=False)
        found[strategy] = getattr(weight, "overwrite_main_grad", False)
    return Observation(
        broken=list(found.values()) != [False, True],
        seen="; ".join(
            f"with {name} a layer {'writes over' if each else 'adds to'} gradients" for name, each in found.items()
        ),
    )


def _whole(strategy: str) -> Any:
    """Return a stub with the attributes that the method reads, of a model whose pipeline gathers nothing."""
    return SimpleNamespace(
        data_parallel_sharding_strategy=strategy,
        all_gather_pipeline=SimpleNamespace(all_gather_params=lambda *_, **__: None),
        suggested_AG_prefetch_size=None,
        dist_index=SimpleNamespace(use_hybrid_fsdp=False),
        ddp_config=SimpleNamespace(outer_dp_sharding_strategy="no_shard", fsdp_double_buffer=False),
        microbatch_count=0,
        model_auto_sync=False,
    )


OVERLAY = Overlay(
    id="fsdp-fused-accumulation",
    pack=71,
    title="keep gradients of all microbatches under Megatron-FSDP with a sharded optimizer and fused accumulation",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.OVERWRITTEN: (Replacement(symbol=feature.TARGET.symbol, make=_make),)},
    unsupported={},
    witness=None,  # upstream may empty the buffer elsewhere
    self_test=observe,
    opt_in=False,
    symptoms=(
        "Megatron-FSDP with `optim` learns from the last microbatch alone",
        "`grad_norm` is too small with Megatron-FSDP, a sharded optimizer and `gradient_accumulation_fusion`",
    ),
    concerns="megatron_fsdp",
    breaks="under Megatron-FSDP with `optim`, fused accumulation of weight gradients and several microbatches, weights of Transformer Engine's layers learn from the last microbatch alone",
    retire_when="Megatron-FSDP sets overwrite_main_grad only where it shards gradients",
    brief="FSDP gradients of earlier microbatches",
    until="only sharded gradients are written over",
    threads=(Thread(repository="NVIDIA/Megatron-LM", number=6357, state="merged 2026-08-18, in no release"),),
    last_validated="2026-11-30, H200 with Transformer Engine 2.20.2, torch 2.11.0: megatron-core 0.19.2; x86-64 without GPU: 0.19.2, dev d48bd6be0a, and main d98e8a64dd, which is right",
)
