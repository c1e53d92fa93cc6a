"""Rows of selected tokens that move up and down again, also within their own memory, in Triton; see `token_selection`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megacpp_overlays.kernels.masked_products.panels import Panels
from megacpp_overlays.kernels.masked_products.panels_triton import panel_group
from megacpp_overlays.kernels.masked_products.row_counts import ROW_ALIGNMENT

_ROW_ALIGNMENT = tl.constexpr(ROW_ALIGNMENT)
_ROWS, _COLUMNS = 128, 64
"""Rows and columns that a program moves at a time; rows of blocks of logits are multiples of this many columns long."""
_ROWS_APART, _COLUMNS_APART = 8, 512
"""Rows and columns that a program copies into other memory."""
_TOKENS = 1024
"""Whose places a program finds."""


def select(wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the parts of a `Selection` of the tokens where `wanted`, (tokens,), bool, is true."""
    tokens = wanted.shape[0]
    order, place = torch.empty((2, tokens), dtype=torch.int64, device=wanted.device).unbind()
    count = (torch.empty if tokens else torch.zeros)(1, dtype=torch.int32, device=wanted.device)
    if tokens:
        _select[(triton.cdiv(tokens, _TOKENS),)](
            wanted.view(torch.uint8), order, place, count, tokens, BLOCK=_TOKENS, num_warps=4
        )
    return order, place, count


def first(rows: torch.Tensor, order: torch.Tensor, count: torch.Tensor, whole: int, out: torch.Tensor) -> None:
    """Write row `order[i]` at i for every i below `count`, and zeros up to the next multiple of `whole`, not 0.

    Args:
        rows: (tokens, n), rows of unit stride.
        order: (tokens,), int64.
        count: (1,), int32; below 0 nothing is written.
        whole: a power of two.
        out: (tokens, n), rows of unit stride.
    """
    _copy(_first, rows, order, count, out, WHOLE=whole)


def put_back_apart(rows: torch.Tensor, place: torch.Tensor, count: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of another dtype with row `place[i]` at i, and zeros where that is `count` or more.

    Args:
        rows: (tokens, n), rows of unit stride.
        place: (tokens,), int64.
        count: (1,), int32.
        dtype: of the result.
    """
    out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    _copy(_put_back_apart, rows, place, count, out)
    return out


def _copy(
    kernel: Any, rows: torch.Tensor, order: torch.Tensor, count: torch.Tensor, out: torch.Tensor, **options: int
) -> None:
    if rows.numel():
        tokens, columns = rows.shape
        kernel[(triton.cdiv(tokens, _ROWS_APART), triton.cdiv(columns, _COLUMNS_APART))](
            rows, rows.stride(0), order, count, out, out.stride(0), tokens, columns,
            ROWS=_ROWS_APART, COLUMNS=_COLUMNS_APART, num_warps=4, **options,
        )  # fmt: skip


def bring_first(rows: torch.Tensor, order: torch.Tensor, count: torch.Tensor, panels: Panels | None = None) -> None:
    """Copy row `order[i]` to row i for every i below `count`, in place.

    Args:
        rows: (tokens, n), rows of unit stride.
        order: (tokens,), int64, ascending up to `count`.
        count: (1,), int32; below 0 nothing is written.
        panels: whose first group the rows hold; in each of them, then.
    """
    planned_rows, number, group_limit = (
        (count, 1, 1) if panels is None else (panels.planned_rows, panels.number, panels.group_limit)
    )
    _move(_bring_first, rows, order, count, planned_rows, number, group_limit, panels_at_most=group_limit)


def put_back(rows: torch.Tensor, order: torch.Tensor, count: torch.Tensor) -> None:
    """Move row i to row `order[i]` for every i below `count`, in place, and leave zeros where none goes.

    Args:
        rows: (tokens, n), rows of unit stride; the rows from `count` on are lost.
        order: (tokens,), int64, ascending up to `count`.
        count: (1,), int32.
    """
    _move(_put_back, rows, order, count)


def _move(
    kernel: Any, rows: torch.Tensor, order: torch.Tensor, count: torch.Tensor, *more: Any, panels_at_most: int = 1
) -> None:
    if rows.numel():
        tokens, columns = rows.shape
        kernel[(triton.cdiv(columns, _COLUMNS), panels_at_most)](
            rows, rows.stride(0), order, count, tokens, columns, *more,
            ROWS=_ROWS, COLUMNS=_COLUMNS, WHOLE=columns % _COLUMNS == 0, num_warps=8,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _select(wanted, order, place, count, tokens, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # Every program counts the selected tokens before its own by itself, instead of waiting for others.
    begin = tl.program_id(0) * BLOCK
    ahead = tl.zeros((BLOCK,), tl.int32)
    every = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        here = tl.load(wanted + token, mask=token < tokens, other=0).to(tl.int32)
        every += here
        ahead += tl.where(token < begin, here, 0)
    selected = tl.sum(every, axis=0)
    token = begin + tl.arange(0, BLOCK)
    inside = token < tokens
    mine = tl.load(wanted + token, mask=inside, other=0).to(tl.int32)
    before = tl.sum(ahead, axis=0) + tl.cumsum(mine, axis=0) - mine
    to = tl.where(mine != 0, before, selected + token - before)
    tl.store(order + to, token.to(tl.int64), mask=inside)
    tl.store(place + token, to.to(tl.int64), mask=inside)
    tl.store(count, selected)  # the same from every program


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _first(  # type: ignore[no-untyped-def]
    rows, stride, order, count, out, out_stride, tokens, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    selected = tl.load(count)
    to = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.where(selected < 0, 0, tl.minimum(tl.maximum(tl.cdiv(selected, WHOLE), 1) * WHOLE, tokens))
    source = tl.load(order + to, mask=to < selected, other=0)
    inside = (column < columns)[None, :]
    values = tl.load(
        rows + source[:, None] * stride + column[None, :], mask=(to < selected)[:, None] & inside, other=0.0
    )
    tl.store(out + to.to(tl.int64)[:, None] * out_stride + column[None, :], values, mask=(to < end)[:, None] & inside)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _put_back_apart(  # type: ignore[no-untyped-def]
    rows, stride, place, count, out, out_stride, tokens, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    selected = tl.load(count)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    source = tl.load(place + token, mask=token < tokens, other=0)
    inside = (column < columns)[None, :]
    here = (token < tokens) & (source < selected)
    values = tl.load(rows + source[:, None] * stride + column[None, :], mask=here[:, None] & inside, other=0.0)
    to = out + token.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(to, values.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & inside)


@triton.jit(do_not_specialize=["tokens", "columns", "panels", "group_limit"])  # type: ignore[untyped-decorator]
def _bring_first(  # type: ignore[no-untyped-def]
    rows, stride, order, count, tokens, columns, planned_rows, panels, group_limit,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    # A row never moves down. So the rows that a step overwrites were read by it or before it, and rows that are read later lie
    # below: a program owns some columns and goes through the rows from the first to the last.
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    _, here, height = panel_group(planned_rows, tokens, panels, group_limit, 0, _ROW_ALIGNMENT)
    panel = tl.program_id(1)
    rows += (panel * height).to(tl.int64) * stride
    selected = tl.where(panel < here, tl.load(count), 0)
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


@triton.jit(do_not_specialize=["tokens", "columns"])  # type: ignore[untyped-decorator]
def _put_back(  # type: ignore[no-untyped-def]
    rows, stride, order, count, tokens, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr
):
    # From the last row to the first: a row never moves up, so rows that are read later lie above all that a step writes.
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    selected = tl.load(count)
    steps = tl.cdiv(tokens, ROWS)
    for step in range(steps):
        place = (steps - 1 - step) * ROWS + tl.arange(0, ROWS)
        counts = (place < selected)[:, None]
        inside = (place < tokens)[:, None]
        if not WHOLE:
            counts = counts & (column < columns)[None, :]
            inside = inside & (column < columns)[None, :]
        target = tl.load(order + place, mask=place < selected, other=1 << 30)  # rows that do not count are cleared, too
        if tl.max(target - place, 0) > 0:
            source = rows + place.to(tl.int64)[:, None] * stride + column[None, :]
            values = tl.load(source, mask=counts, other=0.0)
            tl.debug_barrier()  # every thread has read its rows
            tl.store(source, tl.zeros_like(values), mask=inside)
            tl.debug_barrier()  # another thread's rows are stored there later
            tl.store(rows + target[:, None] * stride + column[None, :], values, mask=counts)
