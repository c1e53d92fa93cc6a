"""Probe `CheckpointWithoutOutput` for outputs that are freed although they are its own input.

It frees the storage of a function's outputs, and recomputes them in the backward pass. A norm that returns its input as the residual,
as Transformer Engine's fused one does, has an output in the storage of the input, which the layer adds and the recomputation reads.

The verdict rests on the class, on the code that frees the outputs of several checkpoints, and on their callees; FIXED also on the norm and the layers that use it.

Source: https://github.com/NVIDIA/Megatron-LM/pull/4497
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

CLASS = "CheckpointWithoutOutput"
METHOD = f"{CLASS}.checkpoint"
TARGET = Target(distribution="megatron-core", module="megatron.core.tensor_parallel.random", symbol=METHOD)
ENGINE = "megatron.core.extensions.transformer_engine"
FREED = "freed"

_ABSENT_WITHOUT = {
    f"{TARGET.module}:{CLASS}": f"defines no {CLASS}",
    f"{ENGINE}#TEFusedResidualRMSNorm": "no norm returns its input beside what it computes",
}


def probe(tree: SourceTree) -> Finding:
    """Return whether an output that is the input is freed."""
    return forms.finding("residual-norm-recompute-alias", TARGET, tree, _ABSENT_WITHOUT)
