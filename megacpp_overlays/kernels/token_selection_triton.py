"""Rows that move up within their own memory, in Triton; see `token_selection`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS = 128, 64


def bring_first(rows: torch.Tensor, order: torch.Tensor, count: torch.Tensor) -> None:
    """Copy row `order[i]` to row i for every i below `count`, in place.

    Args:
        rows: (tokens, n), rows of unit stride.
        order: (tokens,), int64, ascending up to `count`.
        count: (1,), int32.
    """
    if rows.numel():
        _bring_first[(triton.cdiv(rows.shape[1], _COLUMNS),)](
            rows, rows.stride(0), order, count, rows.shape[1], ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8
        )


@triton.jit(do_not_specialize=["columns"])  # type: ignore[untyped-decorator]
def _bring_first(  # type: ignore[no-untyped-def]
    rows, stride, order, count, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    # A row never moves down, so what a step overwrites was read by it or before it, and what is read later lies below:
    # a program owns some columns and goes through the rows from the first to the last.
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    selected = tl.load(count)
    for start in range(0, selected, ROWS):
        place = start + tl.arange(0, ROWS)
        mask = (place < selected)[:, None] & (column < columns)[None, :]
        source = tl.load(order + place, mask=place < selected, other=0)
        values = tl.load(rows + source[:, None] * stride + column[None, :], mask=mask, other=0.0)
        tl.debug_barrier()  # every thread has read its rows
        tl.store(rows + place.to(tl.int64)[:, None] * stride + column[None, :], values, mask=mask)
