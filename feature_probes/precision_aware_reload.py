"""Probe whether main weights that Transformer Engine's FusedAdam keeps follow weights that are loaded into a model.

Source: https://github.com/NovaSky-AI/SkyRL/pull/2149
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target("megatron-core", "megatron.core.optimizer.optimizer", "MixedPrecisionOptimizer.reload_model_params")
STALE = "stale"


def probe(tree: SourceTree) -> Finding:
    """Return whether they stay those of before."""
    return forms.finding("precision-aware-reload", TARGET, tree)
