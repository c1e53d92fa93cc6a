"""Edits that break the repair of `mamba3-mimo-reduce-layout` in TileLang of the lane `mamba3-pinned`."""

from __future__ import annotations

from edited_code import Case, of_lane
from tilelang_files import OLD_REDUCE

from megacpp_overlays.feature_probes import mamba3_mimo_reduce_layout as feature

REPAIR = Case(
    feature,
    f"tilelang:{OLD_REDUCE}",
    edits={
        "refused at the start": (
            "  auto src_scope = this->src.scope();\n",
            '  ICHECK(this->dim == 0) << "cannot lower";\n  auto src_scope = this->src.scope();\n',
        ),
        "refused for some threads": (
            "        int reducing_threads = (*extent) * (*scale);\n",
            "        int reducing_threads = (*extent) * (*scale);\n        ICHECK(reducing_threads <= 32);\n",
        ),
        "workspace left out": ("        if (reducing_threads > 32) {", "        if (false) {"),
        "not all threads": ("        if (*extent == 1)\n          continue;\n", "        continue;\n"),
        "of one thread": ("int reducing_threads = (*extent) * (*scale);", "int reducing_threads = *scale;"),
        "the words of the check": (
            "  auto src_scope = this->src.scope();\n",
            '  LOG(FATAL) << "ReduceOp cannot lower a layout where a source index depends on a";\n  auto src_scope = this->src.scope();\n',
        ),
        "another scope": ('src_scope == "local.fragment"', 'src_scope == "shared"'),
    },
    tree=of_lane("mamba3-pinned"),
)
