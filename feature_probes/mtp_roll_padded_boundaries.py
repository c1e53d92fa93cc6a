"""Probe `roll_tensor` of multi-token prediction for the boundaries between which it rolls documents of a packed row.

Where documents are padded, `cu_seqlens_q` counts their tokens and `cu_seqlens_q_padded` says where they lie. From the second
document on a roll between the former takes labels and masks of neighbours, and zeros in the midst of documents.

The verdict rests on `roll_tensor`, on its callees for packed rows, and on the class of their parameters.

Source: https://github.com/NVIDIA/Megatron-LM/pull/4494
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

ROLL = "roll_tensor"
PACKED = "_roll_tensor_packed_seq"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.multi_token_prediction", symbol=PACKED)
UNPADDED = "unpadded-boundaries"

_ABSENT_WITHOUT = {f"{TARGET.module}#{ROLL}": f"defines no {ROLL}"}


def probe(tree: SourceTree) -> Finding:
    """Return whether a packed row is rolled between boundaries that count no padding."""
    return forms.finding("mtp-roll-padded-boundaries", TARGET, tree, _ABSENT_WITHOUT)
