"""Probe Megatron's MLA for rotary keys, shared by all heads, whose gradient lacks the heads of other tensor parallel ranks.

`k_pos_emb` is one vector for each token. A rank expands it over its own heads, and its gradient is theirs; the sum over ranks
is taken only where the vector was gathered from parts of the sequence. Down projections that each rank has all of need
it without sequence parallelism, too, and those of which a rank has some columns always: their gather splits.

There is no such attention up to 0.9.0, and 0.10.0 and 0.11.0 were not read. The seams are behind the down projection, and the values whose
gradient they sum go through all of `get_query_key_value_tensors`. A second sum by upstream would be one too many.

The verdict rests on all code that could sum: the code that makes keys, the down projections, the constructors, the forward pass, the
functions that gather and split, and the code that finalizes gradients.

Source: https://github.com/NVIDIA/Megatron-LM/issues/1699, https://github.com/NVIDIA/Megatron-LM/pull/6839
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

_CLASS = "MLASelfAttention"
METHOD = f"{_CLASS}.get_query_key_value_tensors"
DOWN, FUSED_DOWN = f"{_CLASS}._qkv_down_projection", f"Fused{_CLASS}._qkv_down_projection"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.multi_latent_attention", symbol=METHOD)
COLUMNS_ALONE = "local-heads-of-columns"
WITHIN = "local-heads"
BEHIND = "local-heads-of-down-projection"

_ABSENT_WITHOUT = {f"{TARGET.module}:{_CLASS}": f"defines no {_CLASS}"}


def probe(tree: SourceTree) -> Finding:
    """Return whether the gradient of the shared rotary keys lacks the heads of other ranks."""
    return forms.finding("mla-rope-key-gradient", TARGET, tree, _ABSENT_WITHOUT)
