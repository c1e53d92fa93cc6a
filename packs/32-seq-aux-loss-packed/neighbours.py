"""MoE layers whose balancing losses are right without the overlay: as a batch, with one packed sample, on one rank, in evaluation, and
with a loss of all tokens, also where the layer is recomputed."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, TargetAbsent, beside, on_ranks

PACK = beside(__file__)
EXPERTS = "megatron.core.models.gpt.moe_module_specs"
CONFIG = "megatron.core.transformer.transformer_config"
RANDOM = "megatron.core.tensor_parallel.random"


def _routed(ranks: int, samples: int, *, packed: bool, trains: bool = True, **asked: Any) -> Mapping[str, object]:
    """Return the losses, output and gradients of an MoE layer on so many ranks.

    Args:
        ranks: of tensor parallelism; with one there is no sequence parallelism.
        samples: how many.
        packed: whether they are one row.
        trains: whether the layer is in training.
        asked: other settings of the layer than those of the reproducer.
    """
    import torch

    for name in (PACK.LAYER, PACK.ROUTER, RANDOM, EXPERTS):
        importlib.import_module(name)
    if "tokens_per_sample" not in importlib.import_module(PACK.PARAMS).PackedSeqParams.__dataclass_fields__:
        raise TargetAbsent("a packed row does not say how long its samples are")

    def run(_: int) -> Mapping[str, Any]:
        from megatron.core import parallel_state

        torch.cuda.current_device = lambda: "cpu"  # where Megatron puts what it makes
        if hasattr(torch.compiler, "set_stance"):
            torch.compiler.set_stance("force_eager")  # what is compiled is the same code
        numbers: Any = importlib.import_module(RANDOM)
        vars(numbers).update(_get_cuda_rng_state=lambda *_, **__: None, _set_cuda_rng_state=lambda *_, **__: None)
        numbers.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
        module: Any = importlib.import_module(CONFIG)
        settings = {"tensor_model_parallel_size": ranks, "sequence_parallel": ranks > 1, **asked}
        theirs = module.TransformerConfig
        module.TransformerConfig = lambda **given: theirs(**{**given, **settings})
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        layer = PACK._layer().train(trains)
        with torch.no_grad():
            for number, each in enumerate(layer.parameters()):
                each.copy_(torch.randn(each.shape, generator=torch.Generator().manual_seed(number)))
        return _learnt(layer, samples, packed=packed)

    return on_ranks(ranks, run)


def _learnt(layer: Any, samples: int, *, packed: bool) -> dict[str, Any]:
    """Return the losses that the router logs, what the layer computes of its tokens, and what its weights and they learn."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.moe.moe_utils import get_moe_metrics_tracker

    generator = torch.Generator().manual_seed(samples)
    tokens, wanted = (torch.randn(samples, PACK.WIDTH, PACK.HIDDEN, generator=generator) for _ in range(2))
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    own, slope = (
        (each.reshape(-1, 1, PACK.HIDDEN) if packed else each.transpose(0, 1).contiguous()).chunk(ranks)[rank].clone()
        for each in (tokens, wanted)
    )
    own.requires_grad_()
    params = PackedSeqParams(qkv_format="thd", tokens_per_sample=PACK.WIDTH) if packed else None
    output = layer._forward_mlp(own, packed_seq_params=params)
    (output * slope).sum().backward()
    logged = {name: each.values for name, each in get_moe_metrics_tracker()._metrics.items()}
    learnt = {f"gradient of {name}": each.grad for name, each in layer.named_parameters() if each.grad is not None}
    return {**logged, "output": output, "gradient of tokens": own.grad, **learnt}


def _neighbour(
    name: str, ranks: int, samples: int, *, packed: bool, is_reordered: bool = False, **asked: Any
) -> Neighbour:
    return Neighbour(
        name=name,
        overlay="seq-aux-loss-packed",
        run=functools.partial(_routed, ranks, samples, packed=packed, **asked),
        rounding=1e-6 if is_reordered else 0.0,
        why_rounding="the row has no axis of samples, so tokens are added up in another order" if is_reordered else "",
    )


NEIGHBOURS = (
    _neighbour("batch", 2, 3, packed=False),
    _neighbour("one-sample", 2, 1, packed=True),
    _neighbour("one-rank", 1, 3, packed=True),
    _neighbour("evaluation", 2, 4, packed=True, trains=False),
    _neighbour("loss-of-all-tokens", 2, 4, packed=True, is_reordered=True, moe_router_load_balancing_type="aux_loss"),
    _neighbour(
        "loss-of-all-tokens-recomputed",
        2,
        3,
        packed=True,
        moe_router_load_balancing_type="aux_loss",
        recompute_granularity="selective",
        recompute_modules=["moe"],
    ),
)
