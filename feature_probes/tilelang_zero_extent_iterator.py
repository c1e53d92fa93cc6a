"""Probe TileLang's layout inference for a division by zero where splits cover more than an iterator.

`get_unused_iters` compares the extent that the splits cover with the extent of the iterator. Up to 0.1.11 only equality counts as
covered, so that a larger one leaves an iterator of extent zero, and a later pass divides by it. 0.1.12 and newer
count more than the extent as covered, too.

The verdict rests on the whole C++ file with the function: a caller may drop the iterators that it leaves over. The wheels
for Linux, macOS and Windows ship it, the same on all platforms, since 0.1.6.post2.
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target(distribution="tilelang", module="tilelang.transform", symbol="LayoutInference")
EQUALITY_ONLY = "only-equality-covers"


def probe(tree: SourceTree) -> Finding:
    """Return whether layout inference has the defect, from the C++ files in the package of the modules."""
    return forms.finding("tilelang-zero-extent-iterator", TARGET, tree)
