"""Megatron-FSDP that shards no gradients, and layers that add theirs to the buffer themselves: are the gradients of all microbatches in it?

A real `MegatronFSDP` of two linear layers takes a step of three microbatches, and the change of all weights is compared with that of the same layers as they are. On a GPU layers are Transformer Engine's with
`fuse_wgrad_accumulation`, on one rank; on a CPU, where that library multiplies nothing, two forked ranks have a layer that treats `main_grad`, `overwrite_main_grad` and `grad_added_to_main_grad` as it does.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import (
    Behaviour,
    Blocked,
    Case,
    compared,
    fsdp_on_cpu,
    fully_shard_module,
    on_ranks,
    step_beside,
    weights_of_all_ranks,
)

OVERLAY = "fsdp-fused-accumulation"
RANKS, HIDDEN, MICROBATCHES = 2, 64, 3
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-2}
"""Relative; products of a GPU are of bfloat16 numbers or of shortened ones."""


def _run(device: str) -> Behaviour:
    said, broken = [], False
    for sharded in ("optim", "no_shard"):
        times, apart = compared(learned(sharded=sharded, device=device), "change")
        broken |= apart > TOLERANCE[device]
        said.append(f"{sharded}: {times:.4f} times as much, {apart:.1e} off")
    return Behaviour(broken=broken, seen=f"weights change in a step of {MICROBATCHES} microbatches; {'; '.join(said)}")


def learned(
    *, sharded: str = "optim", fused: bool = True, overlap: bool = True, microbatches: int = MICROBATCHES, device: str = "cpu"
) -> Mapping[str, list[float]]:
    """Return of each rank how much weights change in a step, and how much they should.

    Args:
        sharded: what is sharded, in Megatron-FSDP's words.
        fused: whether layers add gradients of weights to the buffer themselves.
        overlap: whether gradients are reduced while others are computed.
        microbatches: in the step.
        device: `cpu`, with two ranks, or `cuda`, with one.

    Raises:
        TargetAbsent: this release has no Megatron-FSDP.
        Blocked: on a GPU, Transformer Engine is not installed.
    """
    fully_shard_module()
    run = functools.partial(_learned, sharded, fused, overlap, microbatches, device)
    if device == "cpu":
        return on_ranks(RANKS, run)
    import torch

    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:
        raise Blocked(f"layers are Transformer Engine's: {error}") from error
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return {f"rank 0, {name}": each.tolist() for name, each in run(0).items()}
    finally:
        torch.distributed.destroy_process_group()


def _learned(sharded: str, fused: bool, overlap: bool, microbatches: int, device: str, rank: int) -> Mapping[str, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    if device == "cpu":
        fsdp_on_cpu()
    layer = _fused_layer(device) if fused else torch.nn.Linear
    torch.manual_seed(71)
    plain = torch.nn.Sequential(*(torch.nn.Linear(HIDDEN, HIDDEN, bias=False, device=device) for _ in range(2)))
    copied = torch.nn.Sequential(*(layer(HIDDEN, HIDDEN, bias=False, device=device) for _ in range(2)))
    copied.load_state_dict(plain.state_dict(), strict=False)
    ranks = torch.distributed.get_world_size()
    model, optimizer = fully_shard_module().fully_shard(
        module=copied,
        optimizer=torch.optim.SGD(copied.parameters(), lr=1.0),
        device_mesh=init_device_mesh(device, (ranks, 1), mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[type(copied[0])],
        zero_dp_strategy=sharded,
        device=torch.device(device),
        overlap_grad_reduce=overlap,
        sync_model_each_microbatch=False,
    )
    model.ddp_config.gradient_reduce_div_fusion = False  # as Megatron's option: gloo cannot multiply while it sums
    before = weights_of_all_ranks(model, is_sharded=sharded != "no_shard")
    step_beside(model, plain, optimizer, rank=rank, microbatches=microbatches)
    right = torch.cat([each.grad.flatten() for each in plain.parameters()])
    torch.distributed.all_reduce(right)
    return {"change": before - weights_of_all_ranks(model, is_sharded=sharded != "no_shard"), "right change": right / ranks}


def _fused_layer(device: str) -> Any:
    """Return a class of linear layers that add gradients of weights to the buffer of the model."""
    if device == "cuda":
        return functools.partial(importlib.import_module("transformer_engine.pytorch").Linear, fuse_wgrad_accumulation=True)
    import torch

    class Product(torch.autograd.Function):  # type: ignore[misc] # torch is not seen by the type checker
        """A product with a weight, whose gradient goes into the buffer."""

        @staticmethod
        def forward(ctx: Any, states: Any, weight: Any) -> Any:
            ctx.save_for_backward(states, weight)
            ctx.weight = weight
            return states @ weight.T

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            states, weight = ctx.saved_tensors
            buffer = ctx.weight.get_main_grad() if hasattr(ctx.weight, "get_main_grad") else ctx.weight.main_grad
            ours = gradient.T @ states
            buffer.copy_(ours if getattr(ctx.weight, "overwrite_main_grad", False) else buffer + ours)
            ctx.weight.grad_added_to_main_grad = True
            return gradient @ weight, torch.zeros_like(weight)

    class FusedLinear(torch.nn.Linear):  # type: ignore[misc] # torch is not seen by the type checker
        """A linear layer with that product."""

        def forward(self, states: Any) -> Any:
            return Product.apply(states, self.weight)

    return FusedLinear


_case = functools.partial(Case, overlay=OVERLAY)
CASES = (
    _case(name="protocol-cpu", device="cpu", versions=("torch",), run=functools.partial(_run, "cpu")),
    _case(name="layers-cuda", device="cuda", versions=("transformer-engine", "torch"), run=functools.partial(_run, "cuda")),
)
