"""Where the panels of a group are, as programs find it; see `panels`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def group_of(laid, rows, panels, most, group, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return what `Panels.of_group` does."""
    height = tl.maximum(tl.cdiv(tl.load(laid).to(tl.int32), WHOLE), 1) * WHOLE
    groups = tl.cdiv(panels, tl.minimum(tl.maximum(rows // height, 1), most))
    together = tl.cdiv(panels, groups)
    first = group * together
    return first, tl.maximum(tl.minimum(panels - first, together), 0), height
