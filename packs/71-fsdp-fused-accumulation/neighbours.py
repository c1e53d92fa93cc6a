"""Megatron-FSDP that keeps gradients of all microbatches without the overlay: of layers whose gradients PyTorch adds, where gradients or weights are sharded, with nothing sharded, and in a step of one microbatch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)
ASKED: Mapping[str, Mapping[str, Any]] = {
    "not-fused": {"fused": False},
    "sharded-gradients": {"sharded": "optim_grads"},
    "sharded-weights": {"sharded": "optim_grads_params"},
    "nothing-sharded": {"sharded": "no_shard"},
    "one-microbatch": {"microbatches": 1},
}
NEIGHBOURS = tuple(
    Neighbour(name=name, overlay=PACK.OVERLAY, run=functools.partial(PACK.learned, **asked))
    for name, asked in ASKED.items()
)
