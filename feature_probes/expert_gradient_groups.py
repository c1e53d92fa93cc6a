"""Probe the marks of expert parameters, by which gradients are reduced over the data parallel ranks of experts.

Verdicts rest on linear layers, which make the marks, and on the method by which a layer of experts gets its number.
Source: https://github.com/NVIDIA/Megatron-LM/pull/5916
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

CLASS, UNMARKED = "BaseMoELayer", "unmarked"
TARGET = Target("megatron-core", "megatron.core.transformer.moe.moe_layer", f"{CLASS}.set_layer_number")


def probe(tree: SourceTree) -> Finding:
    """Return whether experts with a tensor parallel size of their own are marked."""
    needed = {"megatron.core.model_parallel_config#expert_tensor_parallel_size": "experts have no size of their own"}
    return forms.finding("expert-gradient-groups", TARGET, tree, needed)
