"""Probe whether Muon orthogonalizes matrices of a gated MLP, and keys and values of multi-latent attention, that are kept in one parameter.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6688
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target("megatron-core", "megatron.core.optimizer.emerging_optimizers", "_create_emerging_optimizer")
AS_ONE = "as-one"
NO_SPLITS_OF_PARAMETERS = "no-splits-of-parameters"


def probe(tree: SourceTree) -> Finding:
    """Return whether such a parameter is orthogonalized as one matrix."""
    return forms.finding("muon-gated-fc1", TARGET, tree)
