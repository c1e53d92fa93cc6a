"""Probe the standard deviation with which experts of a latent MoE begin, whose second projection does not end in the residual.

Experts of a latent MoE read a latent of the hidden state and write one, and a projection of the layer takes it to the residual. Both that
and the experts' second projection begin with the method for output layers, whose deviation is divided by the root of twice
the number of layers.

The verdict rests on the constructor of the experts and on the functions that it builds with.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6278, https://github.com/NVIDIA/Megatron-LM/issues/5225
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

SINGLE, GROUPED = (
    Target(distribution="megatron-core", module=f"megatron.core.transformer.{module}", symbol=f"{name}.__init__")
    for module, name in (("mlp", "MLP"), ("moe.experts", "TEGroupedMLP"))
)
SCALED, SCALED_BY_SPECIFICATION = "scaled-twice", "scaled-twice-by-specification"


def probe_single(tree: SourceTree) -> Finding:
    """Return how an expert that is a module of its own begins."""
    return _probe(tree, SINGLE)


def probe_grouped(tree: SourceTree) -> Finding:
    """Return how experts begin that Transformer Engine computes together."""
    return _probe(tree, GROUPED)


def _probe(tree: SourceTree, target: Target) -> Finding:
    said = "experts read and write hidden states alone"
    needed = {f"{target.module}:{target.symbol}": said, f"{target.module}#moe_latent_size": said}
    return forms.finding("latent-moe-fc2-init", target, tree, needed)
