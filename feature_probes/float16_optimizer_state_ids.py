"""Numbering of parameters in the sharded state of `Float16OptimizerWithFloat16Params` and in its inner optimizer.

Up to 0.19.2 ids are given to the float16 parameters alone, while the state enumerates every parameter of the inner
optimizer: fp32 copies, native fp32 parameters and frozen ones, in group order. Main and dev walk the parameter
groups of the inner optimizer instead.

The verdict rests on the code that builds, saves and shards the state; a repair also on the helpers that number parameters and shard tensors.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5929
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target("megatron-core", "megatron.core.optimizer.optimizer", "Float16OptimizerWithFloat16Params")
FLOAT16_IDS = "float16-ids"

_ABSENT_WITHOUT = {f"{TARGET.module}:{TARGET.symbol}": f"defines no {TARGET.symbol}"}


def probe(tree: SourceTree) -> Finding:
    """Return whether ids are given over the float16 groups or over the inner optimizer."""
    return forms.finding("float16-optimizer-state-ids", TARGET, tree, _ABSENT_WITHOUT)
