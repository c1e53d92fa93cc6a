"""Probe whether attention of transformers takes whichever backend torch prefers, which on Hopper is cuDNN.

Whether gradients are wrong depends on the cuDNN that is loaded, which no source says: the seam asks it.

Source: https://github.com/pytorch/pytorch/issues/196678
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target("transformers", "transformers.integrations.sdpa_attention", "sdpa_attention_forward")
AS_TORCH_PREFERS = "as-torch-prefers"


def probe(tree: SourceTree) -> Finding:
    """Return whether attention is computed by the backend that torch prefers."""
    return forms.finding("cudnn-sdpa-query-gradient", TARGET, tree)
