"""Probe MoE routers of Megatron for balancing losses that are multiplied by the tokens of all ranks in place of one rank's.

Where losses are taken for each token, a router multiplies its balancing loss by the tokens of the rank and by the
number of ranks. Under a padding mask it counts the tokens of the rank in the very sums that were just added up over ranks
in place. Up to 0.15.3 no router counts tokens under a mask; up to 0.18.2 it multiplies by the count alone, for which that of all ranks is
right. No tree has a repair that gives the gradient of one rank; the one that is proposed (#7481) counts before the sum.

The verdict rests on the code that counts, that uses the count, that multiplies by it, and that sums in place.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452, https://github.com/NVIDIA/Megatron-LM/pull/7481
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

FUNCTION = "get_tokens_per_expert_and_token_count"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.moe.moe_utils", symbol=FUNCTION)
COUNTED_TWICE = "counted-twice"

_ABSENT_WITHOUT = {f"{TARGET.module}:{FUNCTION}": f"defines no {FUNCTION}"}


def probe(tree: SourceTree) -> Finding:
    """Return whether tokens are counted twice."""
    return forms.finding("masked-aux-loss-tokens", TARGET, tree, _ABSENT_WITHOUT)
