"""What a program does that may begin before the one ahead of it has ended; see `launches`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

CAN_BE_EARLY = hasattr(cuda, "gdc_wait") and hasattr(cuda, "gdc_launch_dependents")
"""Whether this Triton has the two instructions."""


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_what_is_ahead(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next program begin, and wait until the one ahead has ended and all see what it wrote.

    That one has waited in the same way, so nothing that is further ahead is left either.
    """
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
