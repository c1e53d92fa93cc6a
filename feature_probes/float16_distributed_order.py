"""Order in which `DistributedOptimizer` records the positions of parameters, and in which it installs them.

Its constructor records the position of each parameter in grad-buffer order, then installs each group as fp32 shards
first, copies of float16 shards after them. With both kinds in one group the two orders differ. Restoring state also
copies into a view of an fp32 parameter that autograd tracks. Releases 0.13.0 to 0.19.2 and main have both; dev has
repaired both since 2026-07-18.

The verdict rests on who records positions, who builds the groups, and everybody who reads positions.

Source: https://github.com/NVIDIA/Megatron-LM/issues/2777, https://github.com/NVIDIA/Megatron-LM/pull/5835
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target("megatron-core", "megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer")
STALE_ORDER = "stale-order"

_ABSENT_WITHOUT = {f"{TARGET.module}:{TARGET.symbol}": f"defines no {TARGET.symbol}"}


def probe(tree: SourceTree) -> Finding:
    """Return whether the recorded positions are those of the installed groups."""
    return forms.finding("float16-distributed-order", TARGET, tree, _ABSENT_WITHOUT)
