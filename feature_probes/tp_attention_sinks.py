"""Probe for learnable attention sinks of tensor parallel ranks that are not marked as shares of one parameter.

With `softmax_type="learnable"` a rank has the sinks of its own heads. A parameter without `tensor_model_parallel` is taken for a replica,
which counts on the first rank only wherever norms are taken. There are sinks since 0.15.0, and no tree marks them.

The repair that is proposed marks sinks where they are made, `DotProductAttention` and `TEDotProductAttention`. The seam marks them once
their attention has made its core, unless somebody did. Multi-latent attention makes a core of its own, which has sinks where it is
Transformer Engine's; it is asked about by itself.

The verdict rests on the constructor of the core that makes sinks, and on those of the attention that makes the core.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452, https://github.com/NVIDIA/Megatron-LM/pull/7530
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

CLASSES = ("SelfAttention", "CrossAttention")
TARGET = Target("megatron-core", "megatron.core.transformer.attention", f"{CLASSES[0]}.__init__")
LATENT_CLASS = "MultiLatentAttention"
LATENT_CONSTRUCTOR = f"{LATENT_CLASS}.__init__"
LATENT_TARGET = Target("megatron-core", "megatron.core.transformer.multi_latent_attention", LATENT_CONSTRUCTOR)
CORE = "megatron.core.transformer.dot_product_attention"
NOT_MARKED = "not-marked"
SINKS = "softmax_offset"

_WITHOUT_SINKS = {f"{CORE}#{SINKS}": "attention has no sinks"}


def probe(tree: SourceTree) -> Finding:
    """Return whether sinks are taken for replicas."""
    needed = {f"{TARGET.module}:{CLASSES[0]}": f"defines no {CLASSES[0]}", **_WITHOUT_SINKS}
    return forms.finding("tp-attention-sinks", TARGET, tree, needed)


def probe_latent(tree: SourceTree) -> Finding:
    """Return whether sinks of multi-latent attention are taken for replicas."""
    needed = {f"{LATENT_TARGET.module}:{LATENT_CLASS}": f"defines no {LATENT_CLASS}", **_WITHOUT_SINKS}
    return forms.finding("tp-attention-sinks", LATENT_TARGET, tree, needed)
