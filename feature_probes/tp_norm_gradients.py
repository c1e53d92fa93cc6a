"""Probe for gradients of norms that Megatron sums over tensor parallel ranks by the names of their weights.

Without sequence parallelism a replica has a partial gradient where it feeds only the heads of its rank, and the whole gradient otherwise. The
finalizer sums parameters with `q_layernorm` or `k_layernorm` in their names, which is right for norms of heads.

Up to 0.9.0 there is neither a multi-latent attention nor a gated delta net, and 0.10.0 and 0.11.0 were not read. No tree has a repair.
A seam changes the choice of the summed parameters, so the verdict rests on all code that could choose: the finalizer, the producers and
consumers of latent queries, and the classes that make and use both norms.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

FUNCTION, OLD_FUNCTION = "_allreduce_non_tensor_model_parallel_grads", "_allreduce_layernorm_grads"
TARGET = Target(distribution="megatron-core", module="megatron.core.distributed.finalize_model_grads", symbol=FUNCTION)
BY_NAME, OLD_BY_NAME = "summed-by-name", "layer-norms-summed-by-name"

ATTENTION, ATTENTION_CLASS = "megatron.core.transformer.multi_latent_attention", "MLASelfAttention"


def probe(tree: SourceTree) -> Finding:
    """Return whether gradients of norms are summed by name."""
    return forms.finding("tp-norm-gradients", TARGET, tree)
