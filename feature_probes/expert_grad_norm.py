"""Probe the test for replicas of parameters for experts that tensor parallel ranks do not share, which it takes for replicas.

A parameter without an attribute of tensor parallelism counts on the first tensor parallel rank alone. With `expert_tensor_parallel_size=1` each
rank has experts of its own. Since 0.19.0 the test takes the group of ranks that share an expert, and optimizers hand it over; on dev the test takes it, and
no optimizer hands it over. The verdict rests on the test, and where it takes the group on what hands it over, and on what copies get of a parameter.

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
    """Return whether replicas of experts are told by the ranks that share a layer."""
    return forms.finding("expert-grad-norm", TARGET, tree, _ABSENT_WITHOUT)
