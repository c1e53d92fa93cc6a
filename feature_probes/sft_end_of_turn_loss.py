"""Probe whether Megatron's dataset of conversations masks every label that is the padding token, also where that token ends turns.

A `MegatronDataset` keeps a padding token that is no other special one, `_pad_token_id`. `SFTDataset` pads and masks with that of the tokenizer, so a probe rests on both.
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target("megatron-core", "megatron.training.datasets.sft_dataset", "SFTDataset.__getitem__")
KEPT = "_pad_token_id"
MASKED = "masked-by-token"


def probe(tree: SourceTree) -> Finding:
    """Return whether ends of turns that are also padding have no loss."""
    return forms.finding("sft-end-of-turn-loss", TARGET, tree)
