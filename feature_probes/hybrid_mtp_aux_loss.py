"""Probe `HybridStack` for MoE layers of multi-token prediction that are not marked as such.

A router without the mark treats its layer as one of the decoder. Where one layer makes all predictions its balancing loss
then counts once for each of them, and it is logged for a layer of the decoder.

The verdict rests on the constructor of the stack and on the code that divides a router's loss; FIXED also on the constructors that pass the mark on.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6748
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.findings import unknown
from megacpp_overlays.source.trees import SourceTree

CONSTRUCTOR = "HybridStack.__init__"
TARGET = Target(distribution="megatron-core", module="megatron.core.models.hybrid.hybrid_block", symbol=CONSTRUCTOR)
NOT_TOLD = "not-told"

_OLDER = "megatron.core.ssm.mamba_block"
_ABSENT_WITHOUT = {f"{TARGET.module}:HybridStack": "defines no HybridStack"}


def probe(tree: SourceTree) -> Finding:
    """Return whether MoE layers of a prediction are made as those of the decoder are."""
    older = tree.module(_OLDER)
    if tree.module(TARGET.module) is None and older is not None and "is_mtp_layer" in older.text:
        raise unknown(older, None, f"there is no {TARGET.module}, and is_mtp_layer is mentioned")
    return forms.finding("hybrid-mtp-aux-loss", TARGET, tree, _ABSENT_WITHOUT)
