"""Probe whether Inductor's fused reductions over rows and columns lose a second result that is part of another tensor.

The kernel binds the second result to a new name, and its part of the other tensor stays uninitialised. 2.15.0 copies it there. A second target has the
keys of cached graphs, which do not depend on overlays.

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
    """Return whether a result that is part of another tensor is bound to a new name."""
    return forms.finding("mix-order-reduction-views", TARGET, tree)


def probe_cache(tree: SourceTree) -> Finding:
    """Return whether the cache serves graphs that were compiled without the overlay."""
    return forms.finding("mix-order-reduction-views", CACHE, tree)
