"""Probe the offsets at which `DistributedOptimizer` cuts a parameter's state out of its gathered buffer, for a fully reshardable checkpoint.

`get_parameter_state_dp_zero` gathers the buckets of a grad buffer one behind the other, without the padding at their ends.
`param_index_map` counts that padding. The releases 0.15.0 to 0.19.2 and dev cut with its numbers as they are, so every
parameter behind the first padded bucket gets elements of those behind it, and the last ones zeros. Main subtracts the
padding that was left out since 2026-08-21. Releases up to 0.14.0 have no such format.

The verdict rests on the code that cuts state, that packs the pieces, and that unpacks them; without the format, on the code that would use it, and on
bases that do not have it.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5077
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target("megatron-core", "megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer")
PADDED_SLICES = "padded-slices"

SAVE = "sharded_param_state_fully_reshardable"
LOAD = "load_parameter_state_from_fully_reshardable"

_ABSENT_WITHOUT = {f"{TARGET.module}:{TARGET.symbol}": f"defines no {TARGET.symbol}"}


def probe(tree: SourceTree) -> Finding:
    """Return whether slices are taken with the numbers of the padded buffer."""
    return forms.finding("fully-reshardable-padding", TARGET, tree, _ABSENT_WITHOUT)
