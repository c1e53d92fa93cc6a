"""Weights that are loaded where a precision-aware optimizer is right without the overlay: before its first step, with main weights that are Megatron's, and Adam's moments in any case."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)


def _moments(**asked: Any) -> Mapping[str, list[float]]:
    return {"moments": PACK.reloaded(**asked)["moments"]}


_of = functools.partial(Neighbour, overlay=PACK.OVERLAY)
NEIGHBOURS = (
    _of(name="moments", run=_moments),
    _of(name="before-the-first-step", run=functools.partial(PACK.reloaded, begun=False)),
    _of(name="float32-weights", run=functools.partial(_moments, dtype="float32")),
)
