"""Probe the Trainer of transformers for balancing losses that are summed over microbatches and ranks, where losses of tokens are means.

Source: https://github.com/huggingface/transformers/issues/48690
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target("transformers", "transformers.trainer", "Trainer.compute_loss")
SUMMED = "summed"


def probe(tree: SourceTree) -> Finding:
    """Return whether the balancing loss of each microbatch has the weight of all."""
    return forms.finding("trainer-moe-aux-loss", TARGET, tree)
