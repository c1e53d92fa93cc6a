"""Megatron-FSDP with gradients for a precision-aware optimizer: are those of replicas summed over tensor parallel ranks?

Two tensor parallel ranks are forked and meet with gloo. A real `FullyShardedDataParallel` of a norm and a linear layer runs forwards and backwards on other tokens on each rank, and the real
`finalize_model_grads` runs. The gradient of the norm is compared with the sum over ranks of the gradients of the same layers as they are.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import (
    Behaviour,
    Case,
    TargetAbsent,
    fsdp_on_cpu,
    fully_shard_module,
    meshes_on_cpu,
    on_ranks,
)

OVERLAY = "fsdp-decoupled-grad-sums"
ADAPTER = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"
RANKS, HIDDEN, TOKENS = 2, 8, 4
DECOUPLED = "megatron_fsdp_use_decoupled_grad"
TOLERANCE = 1e-5
"""Relative, of a gradient in float32."""
NORMS: Mapping[str, Mapping[str, Any]] = {
    "under sequence parallelism": {"sequence_parallel": True},
    "of queries": {"qk_layernorm": True},
}


def _run() -> Behaviour:
    import torch

    said, broken = [], False
    for norm, given in NORMS.items():
        found = learned(**given, decoupled=True)
        for rank in range(RANKS):
            mine, right = (torch.tensor(found[f"rank {rank}, {name}"]) for name in ("norm", "right norm"))
            apart = float((mine - right).norm() / right.norm())
            broken |= apart > TOLERANCE
            said.append(f"{norm} {apart:.1e} off on rank {rank}")
    return Behaviour(broken=broken, seen=f"gradients of norms, of {RANKS} tensor parallel ranks: {', '.join(said)}")


def learned(
    *,
    tensor_parallel: int = RANKS,
    decoupled: bool = False,
    sharded: str = "optim_grads_params",
    sequence_parallel: bool = False,
    qk_layernorm: bool = False,
    frozen: bool = False,
) -> Mapping[str, list[float]]:
    """Return of each rank the finalized gradients of both layers, and of the norm the sum over ranks of that without Megatron-FSDP.

    Args:
        tensor_parallel: ranks of two; the others are data parallel.
        decoupled: whether gradients are those of a precision-aware optimizer.
        sharded: what is sharded, in Megatron-FSDP's words.
        sequence_parallel: whether the norm is marked as one of a part of the sequence.
        qk_layernorm: whether the norm is one of queries.
        frozen: whether the norm is.

    Raises:
        TargetAbsent: this release has no Megatron-FSDP, or none with such gradients.
    """
    fully_shard_module()
    if DECOUPLED not in inspect.signature(_distributed().DistributedDataParallelConfig).parameters:
        raise TargetAbsent(f"there is no {DECOUPLED}")
    importlib.import_module(ADAPTER)
    return on_ranks(RANKS, functools.partial(_learned, tensor_parallel, decoupled, sharded, sequence_parallel, qk_layernorm, frozen))


def _distributed() -> Any:
    return importlib.import_module("megatron.core.distributed")


def _learned(
    tensor_parallel: int, decoupled: bool, sharded: str, sequence_parallel: bool, qk_layernorm: bool, frozen: bool, rank: int
) -> Mapping[str, Any]:
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    adapter = _adapter_on_cpu()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=sequence_parallel and tensor_parallel > 1,
        qk_layernorm=qk_layernorm,
    )
    plain, copied = (_layers(sequence_parallel, frozen) for _ in range(2))
    model = adapter.FullyShardedDataParallel(
        config,
        _distributed().DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=sharded != "no_shard",
            overlap_param_gather=sharded != "no_shard",
            data_parallel_sharding_strategy=sharded,
            gradient_reduce_div_fusion=False,  # gloo cannot multiply while it sums
            **{DECOUPLED: decoupled},
        ),
        copied,
        fsdp_unit_modules=[type(copied)],
    )
    model.zero_grad_buffer()
    states = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank))
    for each in (model, plain):
        each(states).square().sum().backward()
    _distributed().finalize_model_grads([model])
    attribute = "decoupled_grad" if decoupled else "grad"
    found = {name: _local(getattr(each, attribute, None)) for name, each in model.named_parameters()}
    norm, linear = (next(each for name, each in found.items() if name.endswith(f"{layer}.weight")) for layer in ("q_layernorm", "linear"))
    return {"norm": norm, "linear": linear, "right norm": torch.zeros(()) if frozen else _sum(plain.q_layernorm.weight.grad)}


def _adapter_on_cpu() -> Any:
    """Return the module of Megatron's adapter with the CPU for the GPU of this process, which is a fork, and a mesh of ranks that takes no einops."""
    import torch

    def ranks(data: Any, tensor: Any, *_: Any, **__: Any) -> Any:
        return torch.arange(RANKS).view(data.size(), tensor.size())

    fsdp_on_cpu()
    adapter = importlib.import_module(ADAPTER)
    inner = importlib.import_module(f"{ADAPTER.rpartition('.')[0]}.src.megatron_fsdp.megatron_fsdp")
    torch.cuda.get_rng_state = lambda *_: torch.zeros(0)  # the first tensor parallel rank hands its own on
    torch.cuda.set_rng_state = lambda *_: None
    vars(adapter).update(torch=vars(inner)["torch"], _get_dp_tp_mesh=ranks)
    meshes_on_cpu(adapter)
    return adapter


def _layers(sequence_parallel: bool, frozen: bool) -> Any:
    import torch

    class Layers(torch.nn.Module):  # type: ignore[misc]
        """A norm, and what is behind it."""

        def __init__(self) -> None:
            super().__init__()
            self.q_layernorm, self.linear = torch.nn.LayerNorm(HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN, bias=False)

        def forward(self, states: Any) -> Any:
            return self.linear(self.q_layernorm(states))

    torch.manual_seed(66)
    layers = Layers()
    for each in layers.q_layernorm.parameters():
        each.sequence_parallel = sequence_parallel
        each.requires_grad_(not frozen)
    return layers


def _local(gradient: Any) -> Any:
    """Return the part of a gradient that this rank has; zero where it has none."""
    import torch

    if gradient is None:
        return torch.zeros(())
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def _sum(gradient: Any) -> Any:
    import torch

    found = gradient.clone()
    torch.distributed.all_reduce(found)
    return found


CASES = (Case(name="norms-cpu", overlay=OVERLAY, device="cpu", versions=("torch",), run=_run),)
