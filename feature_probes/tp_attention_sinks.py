"""Probe for learnable attention sinks of tensor parallel ranks that are not marked as shares of one parameter.

With `softmax_type="learnable"` a rank has the sinks of its own heads. A parameter without `tensor_model_parallel` is taken for a replica,
which counts on the first rank only wherever norms are taken. There are sinks since 0.15.0, and no tree marks them.

The verdict rests on the constructor of the core that makes sinks, and on those of the attention that makes the core. Multi-latent attention
makes a core of its own, so it is a part of its own.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452, https://github.com/NVIDIA/Megatron-LM/pull/7530
"""

from __future__ import annotations

from collections.abc import Callable

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


def _probe_of(target: Target, name: str) -> Callable[[SourceTree], Finding]:
    """Return the probe of an attention whose sinks are taken for replicas."""
    needed = {f"{target.module}:{name}": f"defines no {name}", f"{CORE}#{SINKS}": "attention has no sinks"}
    return lambda tree: forms.finding("tp-attention-sinks", target, tree, needed)


probe, probe_latent = _probe_of(TARGET, CLASSES[0]), _probe_of(LATENT_TARGET, LATENT_CLASS)
