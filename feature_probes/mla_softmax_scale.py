"""Probe whether Megatron's multi-latent attention ignores `softmax_scale` of its configuration.

Multi-latent attention, and its absorbed variant for sparse attention, always divide logits by the root of the head dimension. The target, `build_module`, builds their core attention.

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
    """Return BROKEN where the setting is ignored, ABSENT where there is no multi-latent attention or no such setting."""
    return forms.finding("mla-softmax-scale", TARGET, tree, _NEEDED)
