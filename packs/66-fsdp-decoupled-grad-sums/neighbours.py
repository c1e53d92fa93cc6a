"""Megatron-FSDP whose gradients are finalized right without the overlay: other gradients, norms that are no parts, frozen norms, one tensor parallel rank."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)
ASKED: Mapping[str, Mapping[str, Any]] = {
    "usual-gradients": {"sequence_parallel": True},
    "usual-gradients-of-queries": {"qk_layernorm": True},
    "usual-gradients-unsharded": {"sequence_parallel": True, "sharded": "no_shard"},
    "replicas": {"decoupled": True},
    "frozen-norm": {"decoupled": True, "sequence_parallel": True, "frozen": True},
    "data-parallel": {"decoupled": True, "sequence_parallel": True, "tensor_parallel": 1, "sharded": "optim_grads"},
}
NEIGHBOURS = tuple(
    Neighbour(name=name, overlay=PACK.OVERLAY, run=functools.partial(PACK.learned, **asked))
    for name, asked in ASKED.items()
)
