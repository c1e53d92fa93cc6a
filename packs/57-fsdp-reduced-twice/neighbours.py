"""Megatron-FSDP that reduces gradients once without the overlay: while others are computed, where gradients are sharded, and in a step of one microbatch that is not said to be the last."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)
ASKED: Mapping[str, Mapping[str, Any]] = {
    "overlapped": {"overlap": True},
    "overlapped-sums": {"overlap": True, "mean": False},
    "overlapped-with-nothing-sharded": {"sharded": "no_shard", "overlap": True},
    "sharded-gradients": {"sharded": "optim_grads"},
    "sharded-weights": {"sharded": "optim_grads_params", "mean": False},
    "each-microbatch-overlapped": {"overlap": True, "each_synchronizes": True, "microbatches": 1},
}
NEIGHBOURS = tuple(
    Neighbour(name=name, overlay=PACK.OVERLAY, run=functools.partial(PACK.learned, **asked))
    for name, asked in ASKED.items()
)
