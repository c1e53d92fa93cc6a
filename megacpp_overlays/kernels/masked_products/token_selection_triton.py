"""Rows that move up within their own memory, and down again, in Triton; see `token_selection`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS = 128, 64
"""What a program moves at a time; blocks of logits have rows of whole multiples of so many columns."""


def bring_first(rows: torch.Tensor, order: torch.Tensor, count: torch.Tensor) -> None:
    """Copy row `order[i]` to row i for every i below `count`, in place.

    Args:
        rows: (tokens, n), rows of unit stride.
        order: (tokens,), int64, ascending up to `count`.
        count: (1,), int32.
    """
    _move(_bring_first, rows, order, count)


def put_back(rows: torch.Tensor, order: torch.Tensor, count: torch.Tensor) -> None:
    """Move row i to row `order[i]` for every i below `count`, in place, and leave zeros where none goes.

    Args:
        rows: (tokens, n), rows of unit stride; zeros from `count` on.
        order: (tokens,), int64, ascending up to `count`.
        count: (1,), int32.
    """
    _move(_put_back, rows, order, count)


def _move(kernel: Any, rows: torch.Tensor, order: torch.Tensor, count: torch.Tensor) -> None:
    if rows.numel():
        columns = rows.shape[1]
        kernel[(triton.cdiv(columns, _COLUMNS),)](
            rows, rows.stride(0), order, count, columns,
            ROWS=_ROWS, COLUMNS=_COLUMNS, WHOLE=columns % _COLUMNS == 0, num_warps=8,
        )  # fmt: skip


@triton.jit(do_not_specialize=["columns"])  # type: ignore[untyped-decorator]
def _bring_first(  # type: ignore[no-untyped-def]
    rows, stride, order, count, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr
):
    # A row never moves down, so what a step overwrites was read by it or before it, and what is read later lies below:
    # a program owns some columns and goes through the rows from the first to the last.
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    selected = tl.load(count)
    for start in range(0, selected, ROWS):
        place = start + tl.arange(0, ROWS)
        # A mask of columns would keep a thread from moving 16 bytes at once.
        mask = (place < selected)[:, None]
        if not WHOLE:
            mask = mask & (column < columns)[None, :]
        source = tl.load(order + place, mask=place < selected, other=0)
        if tl.max(source - place, 0) > 0:  # the rows before the first gap are in their place
            values = tl.load(rows + source[:, None] * stride + column[None, :], mask=mask, other=0.0)
            tl.debug_barrier()  # every thread has read its rows
            tl.store(rows + place.to(tl.int64)[:, None] * stride + column[None, :], values, mask=mask)


@triton.jit(do_not_specialize=["columns"])  # type: ignore[untyped-decorator]
def _put_back(  # type: ignore[no-untyped-def]
    rows, stride, order, count, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr
):
    # From the last row to the first: a row never moves up, so what is read later lies above all that a step writes.
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    selected = tl.load(count)
    steps = tl.cdiv(selected, ROWS)
    for step in range(steps):
        place = (steps - 1 - step) * ROWS + tl.arange(0, ROWS)
        mask = (place < selected)[:, None]
        if not WHOLE:
            mask = mask & (column < columns)[None, :]
        target = tl.load(order + place, mask=place < selected, other=0)
        if tl.max(target - place, 0) > 0:
            source = rows + place.to(tl.int64)[:, None] * stride + column[None, :]
            values = tl.load(source, mask=mask, other=0.0)
            tl.debug_barrier()  # every thread has read its rows
            tl.store(source, tl.zeros_like(values), mask=mask)
            tl.debug_barrier()  # and what another one puts there comes later
            tl.store(rows + target[:, None] * stride + column[None, :], values, mask=mask)
