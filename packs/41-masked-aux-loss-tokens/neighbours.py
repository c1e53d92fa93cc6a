"""Balancing losses of MoE routers that are right without the overlay: on one rank, on two without a padding mask, and not taken
for each token."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside, on_ranks

PACK = beside(__file__)


def _learnt(ranks: int, kind: str, *, is_padded: bool) -> Mapping[str, object]:
    """Return what the weights of a router, [experts, hidden], learn from its balancing loss on so many ranks."""
    PACK._prepare()

    def run(_: int) -> Mapping[str, Any]:
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        return {"gradient of weight": PACK._learnt(ranks, kind, is_padded)}

    return on_ranks(ranks, run)


def _neighbour(name: str, ranks: int, kind: str, *, is_padded: bool) -> Neighbour:
    run = functools.partial(_learnt, ranks, kind, is_padded=is_padded)
    return Neighbour(name=name, overlay="masked-aux-loss-tokens", run=run)


NEIGHBOURS = (
    _neighbour("no-mask", 2, "aux_loss", is_padded=False),
    _neighbour("no-mask-by-sequence", 2, "seq_aux_loss", is_padded=False),
    _neighbour("one-rank-padded", 1, "aux_loss", is_padded=True),
    _neighbour("one-rank-padded-by-sequence", 1, "seq_aux_loss", is_padded=True),
)
