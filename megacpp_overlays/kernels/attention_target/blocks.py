"""Blocks of queries: a tensor of (batch, rows, keys) stays small compared with one of (batch, queries, keys)."""

from __future__ import annotations

from collections.abc import Iterator

_BLOCK_ELEMENTS, _BLOCK_ELEMENTS_ON_A_GPU = 1 << 22, 1 << 24
"""Elements of one block: large enough to keep a device busy, small compared with any matrix worth streaming."""


def row_blocks(queries: int, elements_of_a_row: int, device: str) -> Iterator[slice]:
    """Yield slices of queries, in order, each with as many rows as the elements of a block allow."""
    elements = _BLOCK_ELEMENTS if device == "cpu" else _BLOCK_ELEMENTS_ON_A_GPU
    step = max(1, elements // max(1, elements_of_a_row))
    return (slice(first, min(first + step, queries)) for first in range(0, queries, step))
