"""Probe `GPTModel` for padding masks that are cut for sequence parallelism on the first pipeline stage alone, or for another group.

`_preprocess` cuts the mask where it embeds tokens: on the first stage. Those behind it have a shard of the tokens and the whole mask, and
their MoE routers end in an error. And it cuts for the ranks of the process's default group, whatever groups the model was given.

No tree has a repair: #5563 was closed, #5088 is open. The verdict rests on that method and on the `forward` that unpacks its result.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5563
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

PREPROCESS = "GPTModel._preprocess"
TARGET = Target(distribution="megatron-core", module="megatron.core.models.gpt.gpt_model", symbol=PREPROCESS)
FIRST_STAGE = "cut-on-the-first-stage"
DEFAULT_GROUP = "cut-for-the-default-group"

_ABSENT_WITHOUT = {
    f"{TARGET.module}:GPTModel.forward": "defines no GPTModel",
    f"{TARGET.module}#padding_mask": "GPTModel takes no padding_mask",
}


def probe(tree: SourceTree) -> Finding:
    """Return whether the mask is cut on the first stage alone."""
    return forms.finding("pipeline-padding-mask", TARGET, tree, _ABSENT_WITHOUT)
