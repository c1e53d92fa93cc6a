"""Fused linear cross entropies that are right without the overlay: contiguous weights and hidden states, and transposed ones whose loss is multiplied by 1."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)


def _learnt(**asked: Any) -> Mapping[str, object]:
    return {name: each.flatten() for name, each in PACK.learnt(**asked)[0].items()}


_of = functools.partial(Neighbour, overlay=PACK.OVERLAY)
NEIGHBOURS = (
    _of(name="contiguous-mean", run=_learnt),
    _of(name="contiguous-sum", run=functools.partial(_learnt, reduction="sum")),
    _of(name="transposed-weight-times-one", run=functools.partial(_learnt, strided=("weight",), scale=1.0)),
    _of(name="transposed-states-times-one", run=functools.partial(_learnt, strided=("states",), scale=1.0)),
)
