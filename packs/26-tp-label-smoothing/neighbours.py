"""Losses of Megatron's cross entropy that are right without the overlay: on one rank, without smoothing, and over a group of one rank
where the process has another."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, TargetAbsent, beside, on_ranks

PACK = beside(__file__)


def _losses(
    ranks: int, smoothing: float | None, dtype: str = "float32", *, alone: bool = False, evaluated: bool = False
) -> Mapping[str, object]:
    """Return losses, and gradients of the logits, of a vocabulary that ranks share.

    Args:
        ranks: how many.
        smoothing: of the labels; None leaves the argument out.
        dtype: of the logits.
        alone: whether the caller gives each rank a group of its own, with all of the vocabulary.
        evaluated: without gradients.
    """
    module = importlib.import_module(PACK.MODULE)
    if alone and "tp_group" not in inspect.signature(module.vocab_parallel_cross_entropy).parameters:
        raise TargetAbsent("vocab_parallel_cross_entropy takes no group")

    def on_rank(rank: int) -> Mapping[str, Any]:
        import torch
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        groups = [torch.distributed.new_group([each]) for each in range(ranks)] if alone else []
        generator = torch.Generator().manual_seed(26)
        logits = torch.randn(PACK.TOKENS, 1, PACK.CLASSES, generator=generator).to(getattr(torch, dtype))
        truth = torch.randint(PACK.CLASSES, (PACK.TOKENS, 1), generator=generator)
        weights = torch.rand(PACK.TOKENS, 1, generator=generator)
        own = (logits if alone else logits.chunk(ranks, dim=-1)[rank]).clone().requires_grad_(not evaluated)
        arguments = [*(() if smoothing is None else (smoothing,)), *((groups[rank],) if alone else ())]
        losses = module.vocab_parallel_cross_entropy(own * 1.0, truth, *arguments)
        if evaluated:
            return {"losses": losses}
        (losses * weights).sum().backward()
        return {"losses": losses, "gradients of logits": own.grad}

    return on_ranks(ranks, on_rank)


def _neighbour(name: str, *arguments: Any, **options: Any) -> Neighbour:
    run = functools.partial(_losses, *arguments, **options)
    return Neighbour(name=name, overlay="tp-label-smoothing", run=run)


NEIGHBOURS = (
    _neighbour("one-rank", 1, PACK.SMOOTHING),
    _neighbour("no-smoothing", 2, None),
    _neighbour("no-smoothing-of-bf16", 2, 0.0, "bfloat16"),
    _neighbour("no-smoothing-evaluated", 2, 0.0, evaluated=True),
    _neighbour("a-group-of-one-rank", 2, PACK.SMOOTHING, alone=True),
)
