"""Routers that are right without the overlay: without data parallelism, with other losses, in evaluation, and what is left as it is."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)


def _learnt(ranks: int, **asked: Any) -> Mapping[str, object]:
    PACK.prepare()
    found: Mapping[str, object] = PACK.learnt(ranks, **asked)
    return found


ASKED: Mapping[str, Mapping[str, Any]] = {
    "one-rank": {"ranks": 1, "steps": 2},
    "one-rank-for-each-token": {"ranks": 1, "calculate_per_token_loss": True},
    "tensor-parallel": {"ranks": 2, "tensor_parallel": 2},
    "of-a-microbatch": {"ranks": 2, "moe_router_load_balancing_type": "aux_loss", "steps": 2},
    "of-a-sequence": {"ranks": 2, "moe_router_load_balancing_type": "seq_aux_loss"},
    "z-loss": {"ranks": 2, "moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.1},
    "evaluation": {"ranks": 2, "trains": False},
    "no-coefficient": {"ranks": 2, "moe_aux_loss_coeff": 0.0},
}
NEIGHBOURS = tuple(
    Neighbour(name=name, overlay="global-aux-loss-scale", run=functools.partial(_learnt, **asked))
    for name, asked in ASKED.items()
)
