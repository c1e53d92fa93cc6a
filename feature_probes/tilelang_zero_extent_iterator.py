"""TileLang's layout inference, and whether it divides by zero where splits cover more than an iterator.

`get_unused_iters` compares what the splits cover with the extent of the iterator. Up to 0.1.11 only equality counts as
covered, so that more than that leaves an iterator of extent zero, and a later pass divides by it. 0.1.12 and newer
count more than the extent as covered, too. The wheels for Linux, macOS and Windows ship the C++ that they were built
from, and it is the same on all platforms; 0.1.6.post1 ships none.
"""

from __future__ import annotations

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes import cpp_source
from megacpp_overlays.feature_probes.findings import absent, broken, fixed, looks_repaired, unrecognised
from megacpp_overlays.model import Evidence, Finding, Target, Text
from megacpp_overlays.source.trees import SourceTree, shipped

TARGET = Target(distribution="tilelang", module="tilelang.transform", symbol="LayoutInference")
EQUALITY_ONLY = "only-equality-covers"

_FILE = "src/layout/utils.cc"
_HEAD = "Array<IterSplitExpr> get_unused_iters("
_BROKEN = {
    "8d00e9de59343a79": "0.1.6.post2",
    "3a06da05c660b61a": "0.1.7 and 0.1.7.post1",
    "0e1123a080998d80": "0.1.7.post2 and 0.1.7.post3",
    "1d20d915e2f7498a": "0.1.8",
    "2fec060b441fb143": "0.1.9",
    "133b27426e9312af": "0.1.10 and 0.1.11",
}
"""Releases with the defect, by what the whole file says: whoever calls the function may drop what it leaves over."""
_REPAIRED = {"8dfeb7335d9dff49": "0.1.12", "81b730bb122f21b0": "0.1.13 to 0.1.15"}
"""The same with the repair, by the text of the whole file."""
_REPAIR = "analyzer->CanProve(expected_lower_factor > mark->extent)"
"""The condition that 0.1.12 added, and that 0.1.15 still has."""


def probe(tree: SourceTree) -> Finding:
    """Return whether layout inference has the defect, from the C++ beside the modules."""
    if tree.module("tilelang") is None:
        return absent("there is no tilelang")
    if (file := shipped(tree, "tilelang", _FILE)) is None:
        raise SourceError(f"tilelang ships no {_FILE}, so its layout inference cannot be read")
    if (body := cpp_source.function(file, _HEAD)) is None:
        raise SourceError("there is no get_unused_iters, or more than one", file=file.path)
    if _REPAIR in body:
        condition = cpp_source.at(file, _REPAIR, "splits that cover more than the iterator count as covering it")
        repair = [Text(file.path, text := cpp_source.digest(file.text))]
        if text in _REPAIRED:
            return fixed(condition, Evidence(seen=f"as in {_REPAIRED[text]}"), repair=repair)
        return looks_repaired(condition, Evidence(seen=f"the text of the file is unknown: {text}"), repair=repair)
    if (seen := cpp_source.digest(cpp_source.plain(file.text))) in _BROKEN:
        return broken(EQUALITY_ONLY, cpp_source.at(file, _HEAD, f"as in {_BROKEN[seen]}"))
    return unrecognised(cpp_source.at(file, _HEAD, f"get_unused_iters stands in an unknown text {seen}"))
