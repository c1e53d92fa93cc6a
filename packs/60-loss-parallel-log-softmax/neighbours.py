"""Losses that are right under `loss_parallel` without the overlay, which is cross entropy in all of its forms, and log_softmax outside of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK: Any = beside(__file__)
PARALLEL: Mapping[str, Mapping[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "ignored-label": {"ignore_index": 3, "reduction": "sum"},
}


def _parallel(dtype: str = "float32", **options: Any) -> Any:
    return PACK.gradients({"loss": functools.partial(PACK._cross_entropy, **options)}, dtype)


def _each() -> Any:
    def loss(logits: Any, teacher: Any, labels: Any) -> Any:
        return PACK._cross_entropy(logits, teacher, labels, reduction="none").square().sum()

    return PACK.gradients({"loss": loss})


def _weighted() -> Any:
    def loss(logits: Any, teacher: Any, labels: Any) -> Any:
        import torch

        weight = torch.linspace(0.5, 1.5, PACK.CLASSES, dtype=torch.float64)
        return PACK._cross_entropy(logits, teacher, labels, weight=weight)

    return PACK.gradients({"loss": loss})


NEIGHBOURS = (
    *(
        Neighbour(name=name, overlay=PACK.OVERLAY, run=functools.partial(_parallel, **options))
        for name, options in PARALLEL.items()
    ),
    Neighbour(name="bfloat16", overlay=PACK.OVERLAY, run=functools.partial(_parallel, "bfloat16")),
    Neighbour(name="each-row", overlay=PACK.OVERLAY, run=_each),
    Neighbour(name="class-weights", overlay=PACK.OVERLAY, run=_weighted),
    Neighbour(
        name="without-loss-parallel",
        overlay=PACK.OVERLAY,
        run=functools.partial(PACK.gradients, {"distillation": PACK._distillation}, is_parallel=False),
    ),
)
