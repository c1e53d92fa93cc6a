"""Row counts of masked products: how kernels treat the rows after the last one that counts.

A masked product computes the first `count` rows of a matrix that has one row per token. `count` is a (1,) int32 tensor
on the device, so the host launches kernels without knowing it.
"""

from __future__ import annotations

ROW_ALIGNMENT = 128
"""Rows are zero-filled from `count` to the next multiple of this, and to this at least.

It is a multiple of a tile's rows and of a reduction step. So the last tile reads zeros after the rows that count, and a
reduction over rows has at least one step.
"""
NOTHING = -1
"""Row count with which a kernel returns without writing, not even the zeros that a count of 0 gives."""


def aligned_rows(count: int) -> int:
    """Return the number of rows that hold data or zeros for this count."""
    return max(1, -(-count // ROW_ALIGNMENT)) * ROW_ALIGNMENT
