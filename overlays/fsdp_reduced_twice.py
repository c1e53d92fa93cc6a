"""Reduce gradients that Megatron-FSDP does not shard once, before the optimizer's step, where reduction does not overlap.

Without `overlap_grad_reduce` Megatron-FSDP reduces the whole buffer before a step. Its hooks do so as well, in the last microbatch. Here they leave it, as upstream's do since #6357. Sharded gradients, overlapped
reduction, and hybrid sharding, where hooks alone reduce over outer ranks, are upstream's.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6357
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import fsdp_reduced_twice as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread


def _leaving(*strategies: str) -> Callable[[Callable[..., None], ModuleType], Callable[..., None]]:
    """Return the maker of a method that leaves gradients of some strategies to the step."""

    def make(original: Callable[..., None], _module: ModuleType) -> Callable[..., None]:
        def reduce_gradients(self: Any, params: Any, *arguments: Any, **more: Any) -> None:
            settings = self.buffer.ddp_config
            is_theirs = settings.overlap_grad_reduce or self.buffer.dist_index.use_hybrid_fsdp
            if is_theirs or settings.data_parallel_sharding_strategy not in strategies:
                original(self, params, *arguments, **more)

        return reduce_gradients

    return make


def observe(module: ModuleType) -> Observation:
    """Hand hooks' parameters to a pipeline that does not overlap, and see whether it looks at them."""
    settings = SimpleNamespace(overlap_grad_reduce=False, data_parallel_sharding_strategy="optim")
    buffer = SimpleNamespace(ddp_config=settings, dist_index=SimpleNamespace(use_hybrid_fsdp=False))
    seen: list[str] = []

    def parameters() -> Iterator[Any]:
        seen.append("asked")
        yield from ()

    getattr(getattr(module, feature.CLASS), feature.METHOD)(SimpleNamespace(buffer=buffer), parameters())
    return Observation(
        broken=bool(seen), seen=f"hooks {'reduce' if seen else 'leave'} gradients that are reduced before the step"
    )


OVERLAY = Overlay(
    id="fsdp-reduced-twice",
    pack=57,
    title="reduce Megatron-FSDP's unsharded gradients once",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={
        feature.TWICE: (Replacement(symbol=feature.TARGET.symbol, make=_leaving("optim", "no_shard")),),
        feature.OPTIMIZER: (Replacement(symbol=feature.TARGET.symbol, make=_leaving("optim")),),
    },
    unsupported={},
    witness=None,  # upstream repairs it in its hooks
    self_test=observe,
    opt_in=False,
    symptoms=(
        "gradients of Megatron-FSDP are too large with optim or no_shard and without overlap_grad_reduce",
        "Megatron-FSDP with a sharded optimizer trains otherwise without overlap_grad_reduce",
    ),
    concerns="megatron_fsdp",
    breaks="under Megatron-FSDP with `optim` or `no_shard`, without `overlap_grad_reduce` and with several microbatches, gradients are reduced twice: sums of `no_shard` are as many "
    "times too large as there are ranks, and with `optim` each rank mixes a reduced shard with its own gradients",
    retire_when="hooks of Megatron-FSDP reduce unsharded gradients only where reduction overlaps",
    brief="FSDP gradients that are reduced twice",
    until="hooks leave them to the step",
    threads=(Thread(repository="NVIDIA/Megatron-LM", number=6357, state="merged 2026-08-18, in no release"),),
    last_validated="2026-11-28, x86-64 without GPU, torch 2.11.0: megatron-core 0.16.1, 0.18.2, 0.19.2 and dev d48bd6be0a, and main d98e8a64dd, which is right, on two gloo ranks",
)
