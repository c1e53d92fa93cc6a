"""Probe where Megatron-FSDP reduces gradients that it does not shard: in the hooks of the last microbatch, and once more before the optimizer's step.

Where reduction does not overlap, `start_grad_sync` reduces the whole buffer; the hooks reduce it before. Main leaves it to the former since 2026-08-18 (#6357). The verdict
rests on both classes: the model, and the pipeline that its hooks reduce with.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6357
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

CLASS, METHOD = "GradReducePipeline", "reduce_gradients"
TARGET = Target(
    "megatron-core", "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer", f"{CLASS}.{METHOD}"
)
TWICE, OPTIMIZER = "reduced-twice", "sharded-optimizer-reduced-twice"
"""Shapes: up to 0.17.1 the reduction of `no_shard` before the step skips every buffer, and hooks alone reduce."""


def probe(tree: SourceTree) -> Finding:
    """Return whether gradients that are not sharded are reduced by hooks and before the step."""
    return forms.finding("fsdp-reduced-twice", TARGET, tree)
