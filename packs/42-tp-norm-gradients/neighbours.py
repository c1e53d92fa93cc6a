"""Norms whose finalized gradients are right without the overlay: on one rank, of queries and keys of heads, with sequence parallelism, and
where they are averaged or frozen."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside, on_ranks

PACK = beside(__file__)
NORMS = "megatron.core.transformer.torch_norm"
ATTENTION = "megatron.core.transformer.attention"


def _finalized(ranks: int, prepare: Callable[[], Any], *, average: str = "", freeze: str = "") -> Mapping[str, object]:
    """Return the finalized gradients of a layer on so many ranks.

    Args:
        ranks: of tensor parallelism.
        prepare: imports what ranks need, and returns what builds the layer.
        average: a parameter whose gradient is averaged over ranks.
        freeze: a parameter that is not trained.
    """
    finalizer, build = importlib.import_module(PACK.MODULE), prepare()

    def run(_: int) -> Mapping[str, Any]:
        import torch
        from megatron.core import parallel_state

        if hasattr(torch.compiler, "set_stance"):
            torch.compiler.set_stance("force_eager")  # what is compiled is the same code
        with PACK._on_cpu():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
            layer = build(ranks)
            if average:
                layer.get_parameter(average).average_gradients_across_tp_domain = True
            if freeze:
                layer.get_parameter(freeze).requires_grad_(requires_grad=False)
            return _gradients(finalizer, layer)

    return on_ranks(ranks, run)


def _gradients(finalizer: Any, layer: Any) -> dict[str, Any]:
    """Run forwards and backwards, finalize gradients as a training step does, and return them."""
    import torch

    class Model(torch.nn.Module):  # type: ignore[misc]
        """Has what the finalizer asks of a model whose data parallel ranks are one."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.config, self.ddp_config = layer, layer.config, PACK._Nothing()

        def finish_grad_sync(self, **_: Any) -> None:
            """There is one data parallel rank."""

    generator = torch.Generator().manual_seed(2)
    hidden, slope = (torch.randn(PACK.TOKENS, 1, PACK.HIDDEN, generator=generator) for _ in range(2))
    if layer.config.sequence_parallel:
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        hidden, slope = (each.chunk(ranks)[rank].clone() for each in (hidden, slope))
    output, _ = layer(hidden, None)
    (output * slope).sum().backward()
    finalizer.finalize_model_grads([Model()])
    return {name: each.grad for name, each in layer.named_parameters() if each.requires_grad}


def _in_sequence() -> Any:
    """Return what builds the attention of the reproducer for sequence parallelism."""
    build = PACK._attention()
    norms: Any = importlib.import_module(NORMS)

    def of_ranks(ranks: int) -> Any:
        import torch

        class Norm(torch.nn.RMSNorm):  # type: ignore[misc]
            """Says that its gradient is that of a part of the sequence; Megatron's own refuses sequence parallelism."""

            def __init__(self, hidden_size: int, eps: float, **_: Any) -> None:
                super().__init__(hidden_size, eps)
                self.weight.sequence_parallel = True

        common = PACK._common
        vars(PACK)["_common"] = lambda ranks: {**common(ranks), "sequence_parallel": True}  # in this process alone
        norms.WrappedTorchNorm = Norm
        return build(ranks)

    return of_ranks


def _of_heads() -> Any:
    """Return what builds an attention that norms the queries and keys of its heads."""
    module = PACK._imported(ATTENTION)
    importlib.import_module(NORMS)

    def build(ranks: int) -> Any:
        import torch
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.torch_norm import WrappedTorchNorm
        from megatron.core.transformer.transformer_config import TransformerConfig

        class Core(torch.nn.Module):  # type: ignore[misc]
            def __init__(self, **_: Any) -> None:
                super().__init__()

            def forward(self, query: Any, key: Any, value: Any, _mask: Any, **_: Any) -> Any:
                q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
                return torch.nn.functional.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)

        config = TransformerConfig(
            num_layers=1,
            hidden_size=PACK.HIDDEN,
            num_attention_heads=PACK.HEADS,
            qk_layernorm=True,
            **PACK._common(ranks),
        )
        parts = module.SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=Core,
            linear_proj=RowParallelLinear,
            q_layernorm=WrappedTorchNorm,
            k_layernorm=WrappedTorchNorm,
        )
        return PACK._filled(module.SelfAttention(config, parts, layer_number=1), ranks)

    return build


def _neighbour(name: str, ranks: int, prepare: Callable[[], Any], **asked: str) -> Neighbour:
    run = functools.partial(_finalized, ranks, prepare, **asked)
    return Neighbour(name=name, overlay="tp-norm-gradients", run=run)


NEIGHBOURS = (
    _neighbour("latent-queries-one-rank", 1, PACK._attention),
    _neighbour("latent-queries-in-sequence", 2, _in_sequence),
    _neighbour("latent-queries-averaged", 2, PACK._attention, average="q_layernorm.weight"),
    _neighbour("queries-and-keys-of-heads", 2, _of_heads),
    _neighbour("outputs-frozen", 2, PACK._net, freeze="out_norm.weight"),
)
