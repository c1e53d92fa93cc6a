"""Probe the tokens that `process_mtp_loss` weighs a further prediction with where losses are summed over tokens: a rank's, or those of all.

With `calculate_per_token_loss` gradients are divided, once they are summed over ranks, by the tokens of the main loss. A further
prediction has fewer, so its loss is multiplied by the one count over the other. Both are those of the rank.

The verdict rests on `process_mtp_loss`, on what scales its loss, and on all functions that it calls, rolls included.

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
    """Return whether the loss of a further prediction is weighed with the tokens of the rank alone."""
    return forms.finding("mtp-token-counts-local", TARGET, tree, _ABSENT_WITHOUT)
