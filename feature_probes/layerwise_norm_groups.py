"""Probe the layer-wise optimizer for children without groups, so that replicas of experts are determined in the group of other layers.

Since 0.19.0 a parameter of experts that ranks share counts once in the group of these ranks, where an optimizer has it. Children of
`LayerWiseDistributedOptimizer` have none: biases of experts count on the first tensor parallel rank alone. On dev, and in older releases, no
optimizer asks for that group. The verdict rests on its constructor, on its norms and counts of zeros, and on the code that detects replicas.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6099
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

CLASS = "LayerWiseDistributedOptimizer"
CONSTRUCTOR, ZEROS = f"{CLASS}.__init__", f"{CLASS}.count_zeros"
TARGET = Target("megatron-core", "megatron.core.optimizer.layer_wise_optimizer", CONSTRUCTOR)
OPTIMIZER, REPLICAS = "megatron.core.optimizer.optimizer", "expert_tp_group"
NO_GROUPS = "children-without-groups"

_ABSENT_WITHOUT = {
    f"{TARGET.module}:{CLASS}": "there is no layer-wise optimizer",
    f"{OPTIMIZER}#{REPLICAS}": "no optimizer tells replicas of experts by a group of their own",
}


def probe(tree: SourceTree) -> Finding:
    """Return whether children of a layer-wise optimizer have no groups."""
    return forms.finding("layerwise-norm-groups", TARGET, tree, _ABSENT_WITHOUT)
