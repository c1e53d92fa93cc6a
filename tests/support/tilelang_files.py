"""Files of TileLang whose C++ is read, and kernels of Mamba-3 with TMA lowering switched on."""

from __future__ import annotations

from installed import tree_of

from megacpp_overlays.feature_probes import tilelang_bulk_copy_rank

COPY, OLD_COPY = "src/cuda/op/copy.cc", "src/op/copy.cc"
"""Since 0.1.11, and up to 0.1.9."""
REDUCE, OLD_REDUCE = "src/backend/common/op/reduce.h", "src/op/reduce.cc"
"""Since 0.1.10, and up to 0.1.9."""
UTILS = "src/layout/utils.cc"


def switched_on(lane: str) -> str:
    """Return kernels of Mamba-3 in a lane, with TMA lowering on."""
    source = tree_of(lane).module(tilelang_bulk_copy_rank.TARGET.module)
    assert source is not None
    return source.text.replace("TL_DISABLE_TMA_LOWER: True", "TL_DISABLE_TMA_LOWER: False")
