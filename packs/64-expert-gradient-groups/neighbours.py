"""Gradients of experts that are right without the overlay: of the size of layers, on one rank, under expert parallelism, and scattered."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)
ASKED: Mapping[str, Mapping[str, Any]] = {
    "data-parallel": {"tensor_parallel": 1, "expert_tensor_parallel": 1},
    "tensor-parallel": {"tensor_parallel": 2, "expert_tensor_parallel": 2},
    "expert-parallel": {"tensor_parallel": 1, "expert_tensor_parallel": 1, "expert_parallel": 2},
    "whole-experts-in-parallel": {"tensor_parallel": 2, "expert_tensor_parallel": 1, "expert_parallel": 2},
    "one-rank": {"tensor_parallel": 1, "expert_tensor_parallel": 1, "ranks": 1},
    "scattered": {"tensor_parallel": 1, "expert_tensor_parallel": 1, "distributed_optimizer": True},
}
NEIGHBOURS = tuple(
    Neighbour(name=name, overlay=PACK.OVERLAY, run=functools.partial(PACK.learnt, **asked))
    for name, asked in ASKED.items()
)
