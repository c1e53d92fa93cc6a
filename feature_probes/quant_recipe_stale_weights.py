"""Probe whether Megatron sets `is_first_microbatch` on layers that only a quantization recipe quantizes.

Transformer Engine keeps a quantized copy of a weight for the microbatches of a step. A layer makes a new copy when its `is_first_microbatch` is
set. Megatron sets it with `MegatronModule.set_is_first_microbatch`.

The verdict rests on this method. Trees without it, and trees without `TEQuantizationParams`, are ABSENT.

Source: https://github.com/NVIDIA/Megatron-LM/issues/5641, https://github.com/NVIDIA/Megatron-LM/pull/5642
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

CLASS = "MegatronModule"
METHOD = f"{CLASS}.set_is_first_microbatch"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.module", symbol=METHOD)
ENGINE = "megatron.core.extensions.transformer_engine"
NOT_TOLD = "not-told"

_ABSENT_WITHOUT = {
    f"{TARGET.module}:{METHOD}": f"defines no {METHOD}",
    f"{ENGINE}#TEQuantizationParams": "no recipe says what Transformer Engine quantizes",
}


def probe(tree: SourceTree) -> Finding:
    """Return whether `is_first_microbatch` stays unset on layers that only a recipe quantizes."""
    return forms.finding("quant-recipe-stale-weights", TARGET, tree, _ABSENT_WITHOUT)
