"""Muon where it is right without the overlay: matrices of a parameter of their own, queries, keys and values, and what other optimizers do."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)
_TWO = ("linear_fc1", "linear_kv_up_proj")


def _others(**asked: Any) -> Mapping[str, list[float]]:
    """Return the steps of matrices that have a parameter of their own."""
    return {name: each for name, each in PACK.stepped(**asked).items() if not any(two in name for two in _TWO)}


_of = functools.partial(Neighbour, overlay=PACK.OVERLAY)
NEIGHBOURS = (
    _of(name="no-gate", run=functools.partial(PACK.stepped, gated=False)),
    _of(name="other-matrices", run=_others),
    _of(name="other-matrices-latent-attention-masters", run=functools.partial(_others, latent=True, masters=True)),
    _of(name="queries-keys-and-values-as-one", run=functools.partial(_others, muon_split_qkv=False)),
    _of(name="frozen-mlp", run=functools.partial(PACK.stepped, trained="self_attention")),
    _of(name="lion", run=functools.partial(PACK.stepped, optimizer="lion")),
    _of(name="soap", run=functools.partial(PACK.stepped, optimizer="soap")),
)
