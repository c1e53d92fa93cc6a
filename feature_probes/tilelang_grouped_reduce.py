"""The sums of TileLang over groups, and whether values are added more than once.

A fragment that is viewed in groups and summed over each: where the number of groups is no power of two, a group does not
begin where a tile of threads begins, and tilelang 0.1.9 to 0.1.12 add each value once for every value of its group,
without an error. 0.1.8 refuses such sums, and 0.1.13 (tile-ai/tilelang#2424) gets them right, or refuses them with a check
of its own.

The verdict rests on the text of the file of C++ that lowers sums, the same on every platform: `src/backend/common/op/reduce.h`
since 0.1.10, `src/op/reduce.cc` before.
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target(distribution="tilelang", module="tilelang.language", symbol="reduce_sum")
ADDED_TOO_OFTEN = "added-too-often"


def probe(tree: SourceTree) -> Finding:
    """Return whether grouped sums may be wrong, from the C++ files in the package of the modules."""
    return forms.finding("tilelang-grouped-reduce", TARGET, tree)
