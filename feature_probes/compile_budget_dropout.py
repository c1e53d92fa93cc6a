"""Probe torch.compile's partitioner, which draws random numbers anew in the backward pass where an activation budget makes it compute them again.

Verdicts rest on the choice of saved values, on its caller, and on how the cache of compiled graphs is asked: its keys, which say nothing of overlays, are a part of their own.

Source: https://github.com/pytorch/pytorch/issues/190758
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target("torch", "torch._functorch.partitioners", "choose_saved_values_set")
CACHE = Target("torch", "torch._functorch._aot_autograd.autograd_cache", "autograd_cache_key")
DRAWN_AGAIN, CACHED = "drawn-again", "cached-as-cut"


def probe(tree: SourceTree) -> Finding:
    """Return whether random operations may be left out of the saved values."""
    return forms.finding("compile-budget-dropout", TARGET, tree)


def probe_cache(tree: SourceTree) -> Finding:
    """Return whether graphs that were cut so are taken from the cache."""
    return forms.finding("compile-budget-dropout", CACHE, tree)
