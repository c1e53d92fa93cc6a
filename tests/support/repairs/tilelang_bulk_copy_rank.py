"""Edits that break the repair of `tilelang-bulk-copy-rank` in TileLang of the lane `edge`."""

from __future__ import annotations

from edited_code import Case, of_lane
from tilelang_files import COPY, switched_on

from megacpp_overlays.feature_probes import tilelang_bulk_copy_rank as feature

REPAIR = Case(
    feature,
    f"tilelang:{COPY}",
    texts=lambda: {feature.TARGET.module: switched_on("edge")},
    edits={
        "two axes again": (
            "  const TMABulkCopyPlan &plan = bulk_analysis.plan.value();\n",
            '  ICHECK(shared_tensor->shape.size() == 2) << "Cannot detect TMA layout.";\n  const TMABulkCopyPlan &plan = bulk_analysis.plan.value();\n',
        ),
        "no way back": (
            "    return fallback_to_normal(bulk_analysis.reason);\n",
            "    LOG(FATAL) << bulk_analysis.reason;\n",
        ),
        "always refused": (
            '  if (!bulk_analysis.plan.has_value()) {\n    DLOG(WARNING) << "TMA bulk copy',
            '  if (true) {\n    DLOG(WARNING) << "TMA bulk copy',
        ),
        "the other tensor": ("  shared_tensor = plan.shared_tensor;\n", ""),
        "not compiled": (
            "Stmt Copy::LowerBulk(const CopyNode &op, const LowerArgs &lower_args,\n",
            "#if 0\n#endif\nStmt Copy::LowerBulk(const CopyNode &op, const LowerArgs &lower_args,\n",
        ),
        "defined away": ("Stmt Copy::LowerBulk(", "#define has_value() has_no_value()\nStmt Copy::LowerBulk("),
        "another plan": ("  TMADesc desc = plan.desc;\n", "  TMADesc desc = FlatDesc(plan.desc);\n"),
    },
    tree=of_lane("edge"),
)
