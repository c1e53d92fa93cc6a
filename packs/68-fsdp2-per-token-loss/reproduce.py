"""Torch FSDP2 and losses that are sums of tokens: are gradients divided by the tokens of the global batch?

Two data parallel ranks are forked and meet with gloo. A real `TorchFullyShardedDataParallel`, or a `DistributedDataParallel`, of two linear layers runs microbatches, and the real `finalize_model_grads` gets their tokens. Gradients
are compared with those of the same layers on one rank, by the mean over all tokens.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent, cpu_for_gpu, meshes_on_cpu, on_ranks

OVERLAY = "fsdp2-per-token-loss"
MODULE = "megatron.core.distributed.torch_fully_sharded_data_parallel"
FORCED = "force_all_reduce"
RANKS, HIDDEN, TOKENS, MICROBATCHES = 2, 4, (3, 5), 3
"""Each rank has its own number of tokens in a microbatch."""
TOLERANCE = 1e-5
"""Relative, of a gradient in float32."""


def _run() -> Behaviour:
    import torch

    found = learned()
    mine, right = (torch.tensor(found[f"rank 0, {name}"]) for name in ("gradient", "right"))
    apart, times = float((mine - right).norm() / right.norm()), float((mine * right).sum() / right.square().sum())
    tokens = sum(TOKENS) * MICROBATCHES
    return Behaviour(
        broken=apart > TOLERANCE,
        seen=f"{tokens} tokens on {RANKS} data parallel ranks: gradients are {times:.4f} times as large as those of the mean, {apart:.1e} off",
    )


def learned(*, fsdp2: bool = True, per_token: bool = True, frozen: bool = False) -> Mapping[str, list[float]]:
    """Return of each rank the finalized gradients of all layers, and those of the mean over all tokens.

    Args:
        fsdp2: whether Torch FSDP2 wraps the layers, or Megatron's own wrapper.
        per_token: whether losses are sums of tokens, and tokens are counted.
        frozen: whether the first layer is.

    Raises:
        TargetAbsent: this release has no such wrapper, or no training step that takes it.
    """
    from megatron.core import distributed

    try:
        wrapper = importlib.import_module(MODULE).TorchFullyShardedDataParallel
    except ModuleNotFoundError as error:
        raise TargetAbsent(f"there is no {MODULE}") from error
    asked, taken = (inspect.signature(each).parameters for each in (distributed.finalize_model_grads, wrapper.finish_grad_sync))
    if fsdp2 and FORCED in asked and FORCED not in taken:
        raise TargetAbsent("finalize_model_grads raises a TypeError under Torch FSDP2")
    return on_ranks(RANKS, functools.partial(_learned, fsdp2, per_token, frozen))


def _learned(fsdp2: bool, per_token: bool, frozen: bool, rank: int) -> Mapping[str, Any]:
    import torch
    from megatron.core import distributed, parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    meshes_on_cpu(importlib.import_module(MODULE))
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.current_stream = lambda: SimpleNamespace(wait_stream=lambda _: None)
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, use_cpu_initialization=True, calculate_per_token_loss=per_token)
    settings = distributed.DistributedDataParallelConfig()
    layers, plain = (_layers(frozen) for _ in range(2))
    if fsdp2:
        wrapper = importlib.import_module(MODULE).TorchFullyShardedDataParallel
        model = wrapper(config, settings, layers, sub_modules_to_wrap={torch.nn.Linear})
    else:
        with cpu_for_gpu():
            model = distributed.DistributedDataParallel(config, settings, layers)
    model.zero_grad_buffer()
    for states in _microbatches(rank):
        losses = model(states).square().sum(-1)
        (losses.sum() if per_token else losses.mean() / MICROBATCHES).backward()
    counted = torch.tensor(TOKENS[rank] * MICROBATCHES, dtype=torch.int) if per_token else None
    distributed.finalize_model_grads([model], counted)
    every = torch.cat([states for each in range(RANKS) for states in _microbatches(each)])
    plain(every).square().sum(-1).mean().backward()
    right = [each.grad.flatten() for each in plain.parameters() if each.requires_grad]
    return {"gradient": torch.cat([_whole(each) for each in model.parameters() if each.requires_grad]), "right": torch.cat(right)}


def _microbatches(rank: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(TOKENS[rank], HIDDEN, generator=generator) for _ in range(MICROBATCHES)]


def _layers(frozen: bool) -> Any:
    import torch

    torch.manual_seed(68)
    layers = torch.nn.Sequential(*(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(2)))
    layers[0].requires_grad_(not frozen)
    return layers


def _whole(parameter: Any) -> Any:
    """Return a gradient of all ranks, in one row."""
    gradient = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if gradient is None else gradient
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).detach().flatten().clone()


CASES = (Case(name="sums-cpu", overlay=OVERLAY, device="cpu", versions=("torch",), run=_run),)
