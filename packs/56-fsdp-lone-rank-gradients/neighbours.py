"""Megatron-FSDP that the overlay leaves as it is: experts that ranks share, and gradients that are not sharded."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)
ASKED: Mapping[str, Mapping[str, Any]] = {
    "shared-experts": {"expert_parallel": 1},
    "shared-experts-summed": {"expert_parallel": 1, "mean": False},
    "shared-experts-sent-in-bfloat16": {"expert_parallel": 1, "sent": "bfloat16"},
    "shared-experts-of-sharded-gradients": {"expert_parallel": 1, "sharded": "optim_grads"},
    "sharded-optimizer": {"sharded": "optim"},
    "sharded-optimizer-sent-in-bfloat16": {"sharded": "optim", "sent": "bfloat16"},
    "nothing-sharded": {"sharded": "no_shard"},
    "two-of-four-ranks-share": {"ranks": 4, "expert_parallel": 2},
}
NEIGHBOURS = tuple(
    Neighbour(name=name, overlay=PACK.OVERLAY, run=functools.partial(PACK.learned, **asked))
    for name, asked in ASKED.items()
)
