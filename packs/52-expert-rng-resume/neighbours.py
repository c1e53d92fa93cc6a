"""Checkpoints whose random streams are right without the overlay: of ranks that share the stream of experts, or where each saves its own; and all that is not a stream of experts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)
TENSORS = {"tensor_model_parallel_size": 2}


def _others(**settings: Any) -> dict[str, Any]:
    """Return what two expert ranks resume with but for the streams of experts."""
    found = PACK.resumed(PACK.EXPERTS, **settings)
    return {name: each for name, each in found.items() if PACK.EXPERT not in name}


ASKED: dict[str, Mapping[str, Any]] = {
    "tensor-parallel-experts": {"sizes": {**TENSORS, **PACK.EXPERT_TENSORS}},
    "fewer-expert-ranks": {"sizes": PACK.EXPERTS, "later": {}},
    "seeds-of-data-parallel-ranks": {"sizes": PACK.EXPERTS, "data_parallel_random_init": True},
    "files-of-ranks": {"sizes": PACK.EXPERTS, "ckpt_format": "torch"},
    "not-loaded": {"sizes": PACK.EXPERTS, "load": {"no_load_rng": True}},
}
NEIGHBOURS = (
    *(
        Neighbour(name=name, overlay="expert-rng-resume", run=functools.partial(PACK.resumed, **asked))
        for name, asked in ASKED.items()
    ),
    Neighbour(name="other-streams", overlay="expert-rng-resume", run=_others),
)
