"""Edits that break the repair of `tilelang-zero-extent-iterator` in TileLang of the lane `edge`."""

from __future__ import annotations

from edited_code import Case, of_lane
from tilelang_files import UTILS

from megacpp_overlays.feature_probes import tilelang_zero_extent_iterator as feature

_COVERED = "analyzer->CanProve(expected_lower_factor > mark->extent)"

REPAIR = Case(
    feature,
    f"tilelang:{UTILS}",
    edits={
        "equality alone": (
            f"      analyzer->CanProveEqual(expected_lower_factor, mark->extent) ||\n      {_COVERED};",
            "      analyzer->CanProveEqual(expected_lower_factor, mark->extent);",
        ),
        "in a comment": (_COVERED, f"false /* {_COVERED} */"),
        "and false": (_COVERED, f"({_COVERED} && false)"),
        "in a text": (_COVERED, f'Said("{_COVERED}")'),
        "under #if 0": (_COVERED, f"\n#if 0\n{_COVERED}\n#else\nfalse\n#endif\n"),
        "defined away": ("#include", "#define CanProve(x) false\n#include"),
        "asked and not used": ("  if (!covers_full_iter) {", "  if (true) {"),
        "the other way round": (_COVERED, f"!{_COVERED}"),
        "added by the caller": (
            "    results.insert(results.end(), complement_splits.rbegin(),",
            "    results.push_back(IterSplitExpr(mark, 1, 0, 1));\n    results.insert(results.end(), complement_splits.rbegin(),",
        ),
    },
    tree=of_lane("edge"),
)
