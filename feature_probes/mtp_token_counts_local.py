"""Probe whether `process_mtp_loss` weighs a multi-token prediction with token counts of one rank where losses are summed over tokens.

With `calculate_per_token_loss`, gradients are summed over ranks and divided by the tokens of the main loss. A multi-token prediction
has fewer tokens, so upstream multiplies its loss by the ratio of the two counts. It takes both counts from the rank alone.

The verdict rests on `process_mtp_loss`, the scaler of its loss, and all functions that it calls, rolls included.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452, finding 3
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

LOSS = "process_mtp_loss"
ROLL = "roll_tensor"
SCALER = "MTPLossAutoScaler"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.multi_token_prediction", symbol=LOSS)
LOCAL = "local-counts"
LOCAL_OF_LISTS = "local-counts-of-lists"

_ABSENT_WITHOUT = {f"{TARGET.module}:{LOSS}": f"defines no {LOSS}"}


def probe(tree: SourceTree) -> Finding:
    """Return whether the loss of a multi-token prediction is weighed with token counts of one rank."""
    return forms.finding("mtp-token-counts-local", TARGET, tree, _ABSENT_WITHOUT)
