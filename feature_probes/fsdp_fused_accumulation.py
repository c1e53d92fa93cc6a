"""Probe whether Megatron-FSDP lets layers that add gradients to the buffer themselves write over those of earlier microbatches, where it shards no gradients.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6357
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

CLASS, METHOD = "MegatronFSDP", "all_gather_and_wait_parameters_ready"
TARGET = Target("megatron-core", "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp", f"{CLASS}.{METHOD}")
OVERWRITTEN = "overwritten"


def probe(tree: SourceTree) -> Finding:
    """Return whether such layers are to write over the buffer under any strategy."""
    return forms.finding("fsdp-fused-accumulation", TARGET, tree)
