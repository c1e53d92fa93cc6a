"""Gradients that are right without the overlay: means of microbatches under Torch FSDP2, and Megatron's own wrapper with both losses."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)
ASKED: Mapping[str, Mapping[str, Any]] = {
    "means": {"per_token": False},
    "means-frozen-layer": {"per_token": False, "frozen": True},
    "megatron-s-wrapper": {"fsdp2": False},
    "megatron-s-wrapper-means": {"fsdp2": False, "per_token": False},
}
NEIGHBOURS = tuple(
    Neighbour(name=name, overlay=PACK.OVERLAY, run=functools.partial(PACK.learned, **asked))
    for name, asked in ASKED.items()
)
