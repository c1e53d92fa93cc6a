"""Scores of all queries, heads and keys in DSA's absorbed attention without fused kernels.

`_unfused_absorbed_dsa_fn` is the attention of every absorbed layer where `dsa_kernel_backend` is none, the default, and
wherever a backend declines. It multiplies every query with every key, masks the keys that the indexer did not choose, and takes a
softmax over all keys, in float32. Up to 0.15.3 there is no DSA, up to 0.18.2 no absorbed attention. Main of 2026-06-25 has an earlier
form, whose softmax divides by 0 where nothing was chosen, and which no record has. No repair has been seen.

The verdict rests on the function, which is replaced whole, and on all that it asks of `dsa_masking`.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5246
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

_VARIANT = "megatron.core.transformer.experimental_attention_variant"
FUNCTION = "_unfused_absorbed_dsa_fn"
TARGET = Target(distribution="megatron-core", module=f"{_VARIANT}.dsa", symbol=FUNCTION)
MASKING = f"{_VARIANT}.dsa_masking"
ALL_KEYS = "scores-of-all-keys"

_ABSENT_WITHOUT = {f"{TARGET.module}:{FUNCTION}": f"defines no {FUNCTION}"}


def probe(tree: SourceTree) -> Finding:
    """Return whether absorbed attention goes through scores of (batch, heads, queries, keys)."""
    return forms.finding("dsa-sparse-attention", TARGET, tree, _ABSENT_WITHOUT)
