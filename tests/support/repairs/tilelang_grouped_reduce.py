"""Edits that break the repair of `tilelang-grouped-reduce` in TileLang of the lane `edge`."""

from __future__ import annotations

from edited_code import Case, of_lane
from tilelang_files import REDUCE

from megacpp_overlays.feature_probes import tilelang_grouped_reduce as feature

REPAIR = Case(
    feature,
    f"tilelang:{REDUCE}",
    edits={
        "never asked": (
            "  CheckThreadOwnedStepsProjectable(index_expr, reduce_var, thread_steps,\n                                   &proof_analyzer);\n",
            "",
        ),
        "asked of nothing": ("  if (steps.empty()) {\n    return;", "  if (true) {\n    return;"),
        "a warning": (
            "  ICHECK(analyzer->CanProveEqual(projected_index, simplified_index))\n",
            "  if (!analyzer->CanProveEqual(projected_index, simplified_index))\n    LOG(WARNING)\n",
        ),
        "compared with itself": (
            "CanProveEqual(projected_index, simplified_index)",
            "CanProveEqual(simplified_index, simplified_index)",
        ),
        "not projected": ("        FloorMod(FloorDiv(reduce_var, lower), extent) * lower;", "        0;"),
        "counted twice": ("        remaining_thread_owned_factor /= factor;\n", ""),
        "under #if 0": (
            "  ICHECK(analyzer->CanProveEqual(projected_index",
            "#if 0\n#endif\n  ICHECK(analyzer->CanProveEqual(projected_index",
        ),
    },
    tree=of_lane("edge"),
)
