"""Samples of conversations that are right without the overlay: with a padding token of its own, and where padding that is also an end is asked for."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)


def _served(pad: int, *arguments: int, **asked: Any) -> Mapping[str, object]:
    return {**PACK.served(PACK.Tokenizer(pad), *arguments, **asked)}


_of = functools.partial(Neighbour, overlay=PACK.OVERLAY)
NEIGHBOURS = (
    _of(name="padding-of-its-own", run=functools.partial(_served, PACK.PAD)),
    _of(name="padding-of-its-own-cut-off", run=functools.partial(_served, PACK.PAD, length=16)),
    _of(name="padding-of-its-own-for-ranks", run=functools.partial(_served, PACK.PAD, context_parallel_size=2)),
    _of(name="end-as-padding-as-asked", run=functools.partial(_served, PACK.END, allow_ambiguous_pad_tokens=True)),
)
