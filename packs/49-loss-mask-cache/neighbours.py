"""Samples of GPT datasets that are right without the overlay: where no padding is served first, or nothing is cached."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)
CLEAN = (PACK.FIRST_CLEAN, PACK.LAST_CLEAN)


def _samples(order: Sequence[int | None], **other: Any) -> dict[str, Any]:
    """Return everything that samples hold."""
    found = enumerate(PACK.served(order, **other))
    return {f"{name} of sample {at}": value for at, each in found for name, value in each.items()}


def _reset() -> dict[str, Any]:
    """Return samples of a dataset whose caller forgets the cache before each of them, and changes the mask it is given."""
    import tempfile
    from pathlib import Path

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        data = PACK.dataset(Path(folder))
        for at, each in enumerate((PACK.PADDED_TAIL, PACK.PADDED_MIDDLE, *CLEAN)):
            data.masks_and_position_ids_are_cached = False
            found[f"mask {at}"] = data[each]["loss_mask"].mul_(2).clone()
    return found


MIXED = (PACK.PADDED_TAIL, PACK.PADDED_MIDDLE, *CLEAN)
ASKED: dict[str, dict[str, Any]] = {
    "clean-first": {"order": (*CLEAN, PACK.PADDED_TAIL)},
    "padding-alone": {"order": (PACK.PADDED_TAIL, PACK.PADDED_TAIL)},
    "attention-masks": {"order": (*CLEAN, PACK.PADDED_TAIL), "create_attention_mask": True},
    "batch-padding": {"order": (*CLEAN, None)},
    "attention-within-documents": {"order": CLEAN, "inter_document_masking": True},
    "ends-of-documents-without-loss": {"order": MIXED, "eod_mask_loss": True},
    "positions-of-documents": {"order": MIXED, "reset_position_ids": True},
    "attention-of-documents": {"order": MIXED, "reset_attention_mask": True, "create_attention_mask": True},
}
NEIGHBOURS = (
    *(
        Neighbour(name=name, overlay="loss-mask-cache", run=functools.partial(_samples, **asked))
        for name, asked in ASKED.items()
    ),
    Neighbour(name="forgotten-cache", overlay="loss-mask-cache", run=_reset),
)
