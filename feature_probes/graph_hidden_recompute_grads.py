"""Probe Megatron's local CUDA graphs for gradients that are lost where `CheckpointWithoutOutput` recomputes.

A graph's backward pass gives gradients to the parameters that are found by a walk back from the outputs of the forward pass. Functions in
`CheckpointWithoutOutput` are not on that path: they run without gradients, and once more in a hook. Parameters that only they use are
not found, and keep gradients of zero.

The verdict rests on the module of graphs, which sets names that only the running code knows, and on the recomputing code; BROKEN also on
the module of configurations and on the construction of layers.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6373
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

METHOD = "TransformerLayer.__init__"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.transformer_layer", symbol=METHOD)
GRAPHS = "megatron.core.transformer.cuda_graphs"
NOT_FOUND = "not-found"

_ABSENT_WITHOUT = {
    f"{TARGET.module}:TransformerLayer": "defines no TransformerLayer",
    f"{GRAPHS}#graph": "there are no local CUDA graphs",
}


def probe(tree: SourceTree) -> Finding:
    """Return whether graphs find the parameters that only recomputed code uses."""
    return forms.finding("graph-hidden-recompute-grads", TARGET, tree, _ABSENT_WITHOUT)
