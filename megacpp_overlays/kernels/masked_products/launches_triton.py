"""The wait of a program that may begin before the one ahead of it has ended; see `launches`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

CAN_BE_EARLY = hasattr(cuda, "gdc_wait")
"""Whether this Triton has the instruction."""


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_what_is_ahead(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the program ahead has ended and its writes are visible to all.

    That program has waited in the same way, or began after everything, so no program further ahead is left either. The next
    program may not begin before this one ends: measured, steps take up to 2% longer if another program is resident meanwhile.
    """
    if EARLY:
        cuda.gdc_wait()
