"""Probe whether multi-latent attention of Megatron ignores `softmax_scale` of its configuration.

Multi-latent attention, and the absorbed one for sparse attention, scale logits by the root of their head dimension alone. The target is the function that builds their cores.

Source: https://github.com/NVIDIA/Megatron-LM/pull/3698
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target("megatron-core", "megatron.core.transformer.spec_utils", "build_module")
ATTENTION = "megatron.core.transformer.multi_latent_attention"
ABSORBED = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"
CONFIG = "megatron.core.transformer.transformer_config"
IGNORED = "ignored"
_NEEDED = {
    f"{ATTENTION}:MultiLatentAttention": "there is no multi-latent attention",
    f"{CONFIG}#softmax_scale": "attention has no such setting",
}


def probe(tree: SourceTree) -> Finding:
    """Return whether the setting is ignored."""
    return forms.finding("mla-softmax-scale", TARGET, tree, _NEEDED)
