"""Probe whether the output layer of Megatron's hybrid model supports `cross_entropy_fusion_impl="linear"`.

On dev the model, then called `MambaModel`, had the fused layer from 2026-02-03 to 2026-02-26. `HybridModel`, its name since 2026-04-28,
makes a plain `ColumnParallelLinear` and passes logits to a loss that does not know `linear`.

The seam runs upstream's own `forward` on a view of the model. The verdict rests on the whole model and on the path from hidden states
to a loss, fused or not: the fused layer and its function, the scale of logits, the loss, and that of MTP.

Source: https://github.com/NVIDIA/Megatron-LM/pull/3226 (wired on dev) and https://github.com/NVIDIA/Megatron-LM/pull/3574 (lost again).
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target(distribution="megatron-core", module="megatron.core.models.hybrid.hybrid_model", symbol="HybridModel")
_EARLIER = Target(distribution="megatron-core", module="megatron.core.models.mamba.mamba_model", symbol="MambaModel")
"""The same model before 2026-04-28."""
LINEAR = "megatron.core.transformer.linear_cross_entropy"
LAYER = "LinearCrossEntropyModule"
PLAIN_OUTPUT_LAYER = "plain-output-layer"

_ABSENT_WITHOUT = {f"{LINEAR}:": f"there is no module {LINEAR}"}


def probe(tree: SourceTree) -> Finding:
    """Return whether the hybrid model uses the fused linear cross entropy."""
    target = _EARLIER if tree.module(TARGET.module) is None else TARGET
    return forms.finding("hybrid-linear-ce", target, tree, _ABSENT_WITHOUT)
