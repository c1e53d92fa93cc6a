"""Optimizers whose norm the overlay leaves as it is: of weights that are marked, without experts, of experts that ranks share, on one rank, without clipping."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)
ASKED: Mapping[str, Mapping[str, Any]] = {
    "no-biases": {"ranks": 2, "expert_tensor_parallel": 1},
    "no-biases-in-half-precision": {"ranks": 2, "expert_tensor_parallel": 1, "dtype": "bfloat16"},
    "no-experts": {"ranks": 2, "expert_tensor_parallel": 1, "experts": False},
    "shared-experts": {"ranks": 2, "expert_tensor_parallel": 2},
    "shared-experts-without-marks": {"ranks": 2, "expert_tensor_parallel": 2, "marked": False, "dtype": "bfloat16"},
    "replicas": {"ranks": 4, "expert_tensor_parallel": 1, "expert_parallel": 2},
    "one-rank": {"ranks": 1, "expert_tensor_parallel": 1, "marked": False},
    "not-clipped": {"ranks": 2, "expert_tensor_parallel": 1, "clip": 0.0},
}
NEIGHBOURS = tuple(
    Neighbour(name=name, overlay=PACK.OVERLAY, run=functools.partial(PACK.stepped, **asked))
    for name, asked in ASKED.items()
)
