"""Probe a router's token counts by expert, which its bias follows, for padding that is masked along the wrong axis.

`TopKRouter._apply_expert_bias` takes a mask of tokens for one of experts. Where there are other numbers of either, a training step
with a padding mask ends in an error; where they are equal, experts lose counts and padding is counted.

The verdict rests on that method and on `TopKRouter.routing`, which calls it.

Source: https://github.com/NVIDIA/Megatron-LM/issues/6111
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

COUNT = "TopKRouter._apply_expert_bias"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.moe.router", symbol=COUNT)
OVER_EXPERTS = "mask-over-experts"

_ABSENT_WITHOUT = {
    f"{TARGET.module}:TopKRouter.routing": "defines no TopKRouter.routing",
    f"{TARGET.module}#padding_mask": "counts under no padding_mask",
}


def probe(tree: SourceTree) -> Finding:
    """Return whether a mask of tokens is laid over experts."""
    return forms.finding("expert-bias-padding-mask", TARGET, tree, _ABSENT_WITHOUT)
