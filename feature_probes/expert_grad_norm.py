"""Probe the filter of tensor parallel replicas, which takes parameters of experts for replicas where ranks share no expert.

A parameter without an attribute of tensor parallelism counts on the first tensor parallel rank alone. With `expert_tensor_parallel_size=1` each
rank has experts of its own. Since 0.19.0 optimizers pass the expert tensor parallel group to the filter; on dev the filter takes it, and no optimizer
passes it. The verdict rests on the filter, on the function that copies attributes and, where the filter takes the group, on its callers.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5916
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TEST, COPY = "param_is_not_tensor_parallel_duplicate", "copy_tensor_model_parallel_attributes"
TARGET = Target("megatron-core", "megatron.core.tensor_parallel.layers", TEST)
BY_LAYER = "by-ranks-of-layers"

_ABSENT_WITHOUT = {
    "megatron.core.parallel_state:get_expert_tensor_parallel_world_size": "there is no group of ranks that share an expert"
}


def probe(tree: SourceTree) -> Finding:
    """Return whether the filter compares parameters of experts within the tensor parallel group of other layers."""
    return forms.finding("expert-grad-norm", TARGET, tree, _ABSENT_WITHOUT)
