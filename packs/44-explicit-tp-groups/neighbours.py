"""Megatron's layers that are right without the overlay: on default tensor parallel groups, on one rank, and in groups of their own where
nothing that is saved is shared out."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

from megacpp_overlays.repro import Neighbour, beside, on_ranks

PACK = beside(__file__)
CONFIG = "megatron.core.transformer.transformer_config"


class _Layer(NamedTuple):
    """What the reproducer makes of a layer."""

    build: Callable[[Any], Any]
    module: str
    is_cut: bool


def _layer(case: Callable[[], Any]) -> _Layer:
    def asked(build: Callable[[Any], Any], module: str, *, is_cut: bool) -> _Layer:
        return _Layer(build, module, is_cut)

    with mock.patch.object(PACK, "_run", asked):
        found: _Layer = case()
    return found


def _computed(ranks: int, case: Callable[[], Any], *, own: bool = False, **settings: Any) -> Mapping[str, object]:
    """Return the output of a layer and what it learns.

    Args:
        ranks: how many there are.
        case: the case that is about the layer.
        own: whether the layer has the pairs of the reproducer for groups, and not the default ones, which have all ranks.
        settings: others than those of the reproducer.
    """
    layer = _layer(case)
    for name in (PACK.UTILS, PACK.NUMBERS, layer.module):
        PACK._imported(name)

    def run(rank: int) -> Mapping[str, Any]:
        import torch
        from megatron.core import parallel_state

        module: Any = importlib.import_module(CONFIG)
        theirs = module.TransformerConfig
        module.TransformerConfig = lambda **given: theirs(**{**given, **settings})
        alone = [torch.distributed.new_group([each]) for each in range(ranks)][rank]
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2 if own else ranks)
        group, pair = parallel_state.get_tensor_model_parallel_group(), 0
        if own:
            pair = next(number for number, pairs in enumerate(PACK.PAIRS) if rank in pairs)
            group = [torch.distributed.new_group(pairs) for pairs in PACK.PAIRS][pair]
        found: dict[str, Any] = PACK._step(layer.build(PACK._groups(group, alone)), group, pair, is_cut=layer.is_cut)
        return found

    return on_ranks(ranks, run)


def _neighbour(name: str, ranks: int, case: Callable[[], Any], after: str, **asked: Any) -> Neighbour:
    run = functools.partial(_computed, ranks, case, **asked)
    return Neighbour(name=name, overlay="explicit-tp-groups", run=run, after=after)


NEIGHBOURS = (
    _neighbour("cross-attention-default-groups", 2, PACK._cross, "cross-attention-cpu"),
    _neighbour("cross-attention-one-rank", 1, PACK._cross, "cross-attention-cpu"),
    _neighbour("latents-default-groups", 2, PACK._latents, "latents-cpu"),
    _neighbour("latents-one-rank", 1, PACK._latents, "latents-cpu"),
    _neighbour("embeddings-default-groups", 2, PACK._embeddings, "embeddings-cpu"),
    _neighbour("saved-default-groups", 2, PACK._saved, "saved-cpu"),
    _neighbour("saved-whole", 4, PACK._saved, "saved-cpu", own=True, distribute_saved_activations=False),
)
