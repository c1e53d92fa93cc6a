"""Layer-wise optimizers whose norm is right without the overlay: without biases, without experts, with experts that ranks share, on one rank."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)
ASKED: Mapping[str, Mapping[str, Any]] = {
    "no-biases": {"ranks": 2, "expert_tensor_parallel": 1, "bias": False},
    "no-experts": {"ranks": 2, "expert_tensor_parallel": 1, "experts": False},
    "shared-experts": {"ranks": 2, "expert_tensor_parallel": 2, "bias": False},
    "one-rank": {"ranks": 1, "expert_tensor_parallel": 1, "experts": False},
    "not-clipped": {"ranks": 2, "expert_tensor_parallel": 1, "bias": False, "clip": 0.0},
}
NEIGHBOURS = tuple(
    Neighbour(name=name, overlay=PACK.OVERLAY, run=functools.partial(PACK.stepped, **asked))
    for name, asked in ASKED.items()
)
