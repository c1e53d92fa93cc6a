"""Clipped attentions that are right without the overlay: where no largest logit is negative, or none is above the threshold."""

from __future__ import annotations

import functools
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)
KINDS = {"grouped": PACK.ATTENTION, "latent": PACK.LATENT}
ASKED: dict[str, dict[str, Any]] = {
    "all-positive": {"logits": (3.0, 99.9, 400.0, 150.0)},
    "at-the-threshold": {"logits": (100.0, 1e-3, 100.1, 99.9)},
    "nothing-clipped": {"logits": (-3.0, -40.0, 40.0, 99.9)},
    "all-negative": {"logits": (-3.0, -40.0, -1e-3, -0.5)},
    "all-queries": {"logits": (3.0, 99.9, 400.0, 150.0), "qk_clip_alpha": 1.0},
    "other-threshold": {"logits": (0.5, 0.2, 0.7, 1e5), "qk_clip_threshold": 0.3},
    "logged-alone": {"logits": PACK.MIXED, "alone": True},
    "not-enabled": {"logits": PACK.MIXED, "alone": True, "qk_clip": False},
}
NEIGHBOURS = tuple(
    Neighbour(
        name=f"{kind}-{name}",
        overlay="qk-clip-negative-head",
        run=functools.partial(PACK.clipped, module, **asked),
        after="grouped-queries-cpu" if kind == "grouped" else "latent-attention-cpu",
    )
    for kind, module in KINDS.items()
    for name, asked in ASKED.items()
)
