"""Megatron-FSDP that shards no gradients and does not overlap their reduction: how often does it reduce them?

Two ranks are forked and meet with gloo, and train a real `MegatronFSDP` of two linear layers for one step of three microbatches. Compared is the change of all weights with that of
the same layers as they are, by the sum, or the mean over ranks, of all microbatches' gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import (
    Behaviour,
    Case,
    compared,
    fsdp_on_cpu,
    fully_shard_module,
    on_ranks,
    step_beside,
    weights_of_all_ranks,
)

OVERLAY = "fsdp-reduced-twice"
RANKS, HIDDEN, MICROBATCHES = 2, 4, 3
TOLERANCE = 1e-5
WAYS: Mapping[str, Mapping[str, Any]] = {
    f"{sharded}, {'means' if mean else 'sums'}": {"sharded": sharded, "mean": mean}
    for sharded in ("optim", "no_shard")
    for mean in (True, False)
}


def _run() -> Behaviour:
    said, broken = [], False
    for way, given in WAYS.items():
        times, apart = compared(learned(**given), "change")
        broken |= max(abs(times - 1), apart) > TOLERANCE
        said.append(f"{way}: {times:.4f} times as much, {apart:.1e} off")
    return Behaviour(broken=broken, seen=f"weights of {RANKS} ranks change in a step of {MICROBATCHES} microbatches; {'; '.join(said)}")


def learned(
    *, sharded: str = "optim", mean: bool = True, overlap: bool = False, microbatches: int = MICROBATCHES, each_synchronizes: bool = False
) -> Mapping[str, list[float]]:
    """Return of each rank how much weights change in a step, and how much they should.

    Args:
        sharded: what is sharded, in Megatron-FSDP's words.
        mean: whether gradients are divided by the number of ranks.
        overlap: whether they are reduced while others are computed.
        microbatches: in the step.
        each_synchronizes: whether ranks reduce after each microbatch, and not after the last alone.

    Raises:
        TargetAbsent: this release has no Megatron-FSDP.
    """
    fully_shard_module()
    return on_ranks(RANKS, functools.partial(_learned, sharded, mean, overlap, microbatches, each_synchronizes))


def _learned(sharded: str, mean: bool, overlap: bool, microbatches: int, each_synchronizes: bool, rank: int) -> Mapping[str, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    fsdp_on_cpu()
    torch.manual_seed(57)
    plain, copied = (torch.nn.Sequential(*(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(2))) for _ in range(2))
    copied.load_state_dict(plain.state_dict())
    model, optimizer = fully_shard_module().fully_shard(
        module=copied,
        optimizer=torch.optim.SGD(copied.parameters(), lr=1.0),
        device_mesh=init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[torch.nn.Linear],
        zero_dp_strategy=sharded,
        device=torch.device("cpu"),
        calculate_per_token_loss=not mean,
        overlap_grad_reduce=overlap,
        sync_model_each_microbatch=each_synchronizes,
    )
    model.ddp_config.gradient_reduce_div_fusion = False  # as Megatron's option: gloo cannot multiply while it sums
    before = weights_of_all_ranks(model, is_sharded=sharded != "no_shard")
    step_beside(model, plain, optimizer, rank=rank, microbatches=microbatches)
    right = torch.cat([each.grad.flatten() for each in plain.parameters()])
    torch.distributed.all_reduce(right)
    return {"change": before - weights_of_all_ranks(model, is_sharded=sharded != "no_shard"), "right change": right / (RANKS if mean else 1)}


CASES = (Case(name="unsharded-cpu", overlay=OVERLAY, device="cpu", versions=("torch",), run=_run),)
