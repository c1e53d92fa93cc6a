"""The sums of TileLang over groups, and whether values are added more than once.

A fragment that is viewed in groups and summed over each: where the number of groups is no power of two, a group does not
begin where a tile of threads begins, and tilelang 0.1.9 to 0.1.12 add each value once for every value of its group,
without an error. 0.1.8 refuses such sums, and 0.1.13 (tile-ai/tilelang#2424) gets them right, or refuses them with a check
of its own. The code of the releases in between is known by its text.
"""

from __future__ import annotations

from megacpp_overlays.feature_probes import cpp_source, tilelang_sums
from megacpp_overlays.feature_probes.findings import absent, broken, fixed, looks_repaired
from megacpp_overlays.model import Evidence, Finding, Target
from megacpp_overlays.source.trees import SourceTree

TARGET = Target(distribution="tilelang", module="tilelang.language", symbol="reduce_sum")
ADDED_TOO_OFTEN = "added-too-often"

_WRONG = {"0.1.9", "0.1.10", "0.1.11", "0.1.12"}
_REFUSING = {"0.1.8"}
_RIGHT = {"0.1.13", "0.1.14", "0.1.15"}


def probe(tree: SourceTree) -> Finding:
    """Return whether grouped sums may be wrong, from the C++ beside the modules."""
    if tree.module("tilelang") is None:
        return absent("there is no tilelang")
    sums = tilelang_sums.read(tree)
    if sums.release in _RIGHT:
        seen = "what would be added too often is lowered in another way or refused"
        return fixed(cpp_source.at(sums.file, tilelang_sums.CHECK, f"{seen}, as in {sums.release}"), repair=[sums.text])
    if sums.release in _REFUSING:
        refused = Evidence(seen=f"such sums are refused, as in {sums.release}", file=sums.file.path)
        return fixed(refused, repair=[sums.text])
    if sums.release in _WRONG:
        return broken(ADDED_TOO_OFTEN, Evidence(seen=f"sums are lowered as in {sums.release}", file=sums.file.path))
    if sums.checks:
        check = cpp_source.at(sums.file, tilelang_sums.CHECK, "it has the words of the check of 0.1.13")
        return looks_repaired(
            check, Evidence(seen=f"the text of the file is unknown: {sums.digest}"), repair=[sums.text]
        )
    raise sums.unknown()
