"""Probe whether TileLang refuses a sum of the Mamba-3 MIMO backward.

tilelang 0.1.13 (tile-ai/tilelang#2424) refuses to lower a sum where it cannot prove that the layout of its fragment is the same
for every thread. `mamba_mimo_bwd_bwd` has such sums, in the plain and in the variable-length form, so that it does not
compile any more; up to 0.1.12 they were lowered, and right.

The verdict rests on the text of the file of tilelang that lowers sums. If that refuses some, it also rests on the text of both
modules with the kernels, because their host functions may call other kernels.
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

_PACKAGE = "mamba_ssm.ops.tilelang.mamba3"
TARGET = Target(distribution="mamba-ssm", module=f"{_PACKAGE}.mamba3_mimo_bwd", symbol="mamba_mimo_bwd_bwd")
REFUSED = "sum-refused"

_ABSENT_WITHOUT = {"tilelang:": "there is no tilelang"}


def probe(tree: SourceTree) -> Finding:
    """Return whether the backward pass of Mamba-3 MIMO compiles."""
    return forms.finding("mamba3-mimo-reduce-layout", TARGET, tree, _ABSENT_WITHOUT)
