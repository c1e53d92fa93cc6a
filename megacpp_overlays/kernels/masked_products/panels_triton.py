"""Panel groups in device code: `panels.Panels.group` for Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def panel_group(planned_rows, rows, panels, group_limit, index, ROW_ALIGNMENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the fields of a `panels.PanelGroup`: first panel, number of panels, rows from one panel to the next."""
    pitch = tl.maximum(tl.cdiv(tl.load(planned_rows).to(tl.int32), ROW_ALIGNMENT), 1) * ROW_ALIGNMENT
    groups = tl.cdiv(panels, tl.minimum(tl.maximum(rows // pitch, 1), group_limit))
    size = tl.cdiv(panels, groups)
    first = index * size
    return first, tl.maximum(tl.minimum(panels - first, size), 0), pitch
