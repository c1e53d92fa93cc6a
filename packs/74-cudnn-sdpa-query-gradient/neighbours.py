"""Attention of transformers that is right without the overlay: of other lengths, causal without a mask, without gradients, in float32, with a backend that the user chose, on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)


def _attended(
    queries: int, keys: int, *, logit: float = -120.0, dtype: str = "bfloat16", masked: bool = False, **asked: Any
) -> Mapping[str, object]:
    """Return the output and gradients of attention of two heads."""
    import torch

    device = asked.pop("device", "cuda")
    given = [each.to(getattr(torch, dtype)) for each in PACK.tensors(queries, keys, logit=logit, device=device)]
    mask = torch.ones((queries, keys), dtype=torch.bool, device=device).tril() if masked else None
    return {**PACK.attended(*given, mask=mask, **asked)}


def _without_gradient(queries: int, keys: int) -> Mapping[str, object]:
    import torch

    with torch.no_grad():
        return {"output": PACK.attention()(torch.nn.Module(), *PACK.tensors(queries, keys), None)[0]}


_ASKED: Mapping[str, functools.partial[Mapping[str, object]]] = {
    "whole-tiles": functools.partial(_attended, 128, 128, masked=True),
    "causal": functools.partial(_attended, 192, 192),
    "other-remainder": functools.partial(_attended, 160, 160, masked=True),
    "float32": functools.partial(_attended, 192, 192, dtype="float32", masked=True),
    "without-gradient": functools.partial(_without_gradient, 192, 192),
    "one-query-without-gradient": functools.partial(_without_gradient, 1, 128),
    "math-chosen": functools.partial(_attended, 192, 192, masked=True, backend="MATH"),
    "efficient-chosen": functools.partial(_attended, 192, 192, masked=True, backend="EFFICIENT_ATTENTION"),
    "cudnn-chosen": functools.partial(_attended, 192, 192, logit=0.0, masked=True, backend="CUDNN_ATTENTION"),
    "on-a-cpu": functools.partial(_attended, 192, 192, masked=True, device="cpu"),
}
NEIGHBOURS = tuple(
    Neighbour(name=name, overlay=PACK.OVERLAY, after="mask-gpu", run=run) for name, run in _ASKED.items()
)
