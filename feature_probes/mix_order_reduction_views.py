"""Probe Inductor's reductions of two orders in one kernel, whose second result is lost where it is a part of another tensor.

It is bound to a new name, and its place stays as it was allocated. 2.15.0 copies it there. Keys of cached graphs, which say nothing of overlays, are a part of their own.

Source: https://github.com/pytorch/pytorch/issues/193061
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

CLASS, FUSED, PICKLER = "MixOrderReduction", "FusedMixOrderReductions", "FxGraphCachePickler"
TARGET = Target("torch", "torch._inductor.scheduler", f"{CLASS}.can_fuse")
CACHE = Target("torch", "torch._inductor.codecache", f"{PICKLER}.dumps")
ADDED = f"{FUSED}.sub_node_can_fuse"
BOUND_ANEW, CACHED = "bound-anew", "cached-as-fused"


def probe(tree: SourceTree) -> Finding:
    """Return whether results that are parts of other tensors are bound to new names."""
    return forms.finding("mix-order-reduction-views", TARGET, tree)


def probe_cache(tree: SourceTree) -> Finding:
    """Return whether graphs that were compiled so are taken from the cache."""
    return forms.finding("mix-order-reduction-views", CACHE, tree)
