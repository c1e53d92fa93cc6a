"""Products whose number of rows only the device knows, in Triton; see `products`.

A program takes tile after tile of the result, as many as the rows make, and a tile is summed in one order by one
program: the same rows give the same bits. Tiles travel through tensor descriptors, which are the bulk copies of
Hopper and Blackwell and plain reads elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

_GROUP = 16
"""Tiles of rows in a strip, whose programs run at one time and share what they read in the L2 cache.

With 132 programs and tiles of 128 rows and 256 columns, 16 of them read least: about as many rows as columns.
"""
_SUMMED_ROWS, _SUMMED_COLUMNS = 64, 64
"""What a program adds up at a time; its lanes meet once, at the end."""
_ALIGNMENT = 16
"""Bytes, of a descriptor's start and of its rows."""


class Tile(NamedTuple):
    """How the programs of a product work."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int


_LARGE = Tile(128, 256, 64, 4, 8)
_SMALL = Tile(128, 128, 32, 3, 8)
_STAGES_OF_A_SUM = 3
"""At most, where a tile is added to what is there, which needs room, too."""
_STAGES_OF_CHOSEN = 3
"""At most, where rows are chosen: they are read by threads, ahead of the bulk copies beside them."""
_SHARED_BY_LARGE = 229_408
"""Bytes, compiled for compute capability 9.0 with triton 3.6.0, without a spilled register."""


def fits(dtype: torch.dtype, *matrices: torch.Tensor) -> bool:
    """Return whether descriptors can address these matrices, and copies of them without padding, in this dtype too."""
    return all(
        each.stride(1) == 1
        and each.data_ptr() % _ALIGNMENT == 0
        and each.stride(0) * each.element_size() % _ALIGNMENT == 0
        and each.shape[1] * min(dtype.itemsize, each.element_size()) % _ALIGNMENT == 0
        for each in matrices
    )


def product_of_rows(
    left: torch.Tensor,
    right: torch.Tensor,
    count: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    order: torch.Tensor | None = None,
) -> None:
    """See `products.Products.of_rows`."""
    rows, depth = left.shape
    columns = right.shape[1]
    if rows == 0 or columns == 0:
        return
    tile = _tile(left.device, add)
    transposed = right.stride(0) == 1
    programs = _programs(rows, columns, tile, left.device)
    if order is not None:
        _of_chosen_rows[(programs,)](
            left, left.stride(0), order,
            _descriptor(right.t(), tile.columns, tile.depth) if transposed else _descriptor(right, tile.depth, tile.columns),
            _descriptor(out, tile.rows, tile.columns // 4),
            count, columns, depth, programs,
            TRANSPOSED=transposed, WHOLE=depth % tile.depth == 0, GROUP=_GROUP,
            ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
            num_stages=min(tile.stages, _STAGES_OF_CHOSEN), num_warps=tile.warps,
        )  # fmt: skip
        return
    _of_rows[(programs,)](
        _descriptor(left, tile.rows, tile.depth),
        _descriptor(right.t(), tile.columns, tile.depth) if transposed else _descriptor(right, tile.depth, tile.columns),
        _descriptor(out, tile.rows, tile.columns // 4),
        count, columns, depth, programs,
        TRANSPOSED=transposed, ADD=add, GROUP=_GROUP, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
        num_stages=tile.stages, num_warps=tile.warps,
    )  # fmt: skip


def product_over_rows(
    left: torch.Tensor,
    right: torch.Tensor,
    count: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    order: torch.Tensor | None = None,
) -> None:
    """See `products.Products.over_rows`."""
    height, width = out.shape
    if height == 0 or width == 0 or left.shape[0] == 0:
        if not add:
            out.zero_()
        return
    tile = _tile(left.device, add)
    programs = _programs(height, width, tile, left.device)
    if order is not None:
        _over_chosen_rows[(programs,)](
            _descriptor(left, tile.depth, tile.rows),
            right, right.stride(0), order,
            _descriptor(out, tile.rows, tile.columns // 4),
            count, height, width, programs,
            ADD=add, WHOLE=width % tile.columns == 0, GROUP=_GROUP,
            ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
            num_stages=min(tile.stages, _STAGES_OF_CHOSEN), num_warps=tile.warps,
        )  # fmt: skip
        return
    _over_rows[(programs,)](
        _descriptor(left, tile.depth, tile.rows),
        _descriptor(right, tile.depth, tile.columns),
        _descriptor(out, tile.rows, tile.columns // 4),
        count, height, width, programs,
        ADD=add, GROUP=_GROUP, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
        num_stages=tile.stages, num_warps=tile.warps,
    )  # fmt: skip


def sum_of_rows(matrix: torch.Tensor, count: torch.Tensor, out: torch.Tensor) -> None:
    """See `products.Products.sum_rows`."""
    rows, columns = matrix.shape
    if rows == 0 or columns == 0:
        out.zero_()
        return
    _sum_of_rows[(triton.cdiv(columns, _SUMMED_COLUMNS),)](
        matrix, matrix.stride(0), count, out, columns, ROWS=_SUMMED_ROWS, COLUMNS=_SUMMED_COLUMNS, num_warps=8
    )


def _tile(device: torch.device, add: bool) -> Tile:
    tile = _largest(device)
    return tile._replace(stages=min(tile.stages, _STAGES_OF_A_SUM)) if add else tile


def _largest(device: torch.device) -> Tile:
    if device.type != "cuda":
        return _SMALL
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return _LARGE if shared >= _SHARED_BY_LARGE else _SMALL


def _programs(rows: int, columns: int, tile: Tile, device: torch.device) -> int:
    tiles: int = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    if device.type != "cuda":
        return tiles
    programs: int = torch.cuda.get_device_properties(device).multi_processor_count
    return min(tiles, programs)


def _descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


@triton.jit  # type: ignore[untyped-decorator]
def _place(tile, tiles_of_rows, tiles_of_columns, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    strip = tile // (GROUP * tiles_of_columns)
    # Loops that became one look at a tile after the last, where no row is left to divide by.
    height = tl.maximum(tl.minimum(tiles_of_rows - strip * GROUP, GROUP), 1)
    inside = tile % (GROUP * tiles_of_columns)
    return strip * GROUP + inside % height, inside // height


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    out, row, column, total, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    # In quarters: a whole tile in float32 has no room in shared memory beside what is read ahead.
    left, right = _halves(total, ROWS, COLUMNS)
    first, second = _halves(left, ROWS, COLUMNS // 2)
    third, fourth = _halves(right, ROWS, COLUMNS // 2)
    _write_part(out, row, column, first, ADD)
    _write_part(out, row, column + COLUMNS // 4, second, ADD)
    _write_part(out, row, column + COLUMNS // 2, third, ADD)
    _write_part(out, row, column + 3 * (COLUMNS // 4), fourth, ADD)


@triton.jit  # type: ignore[untyped-decorator]
def _halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    left, right = tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
    return left, right


@triton.jit  # type: ignore[untyped-decorator]
def _write_part(out, row, column, part, ADD: tl.constexpr):  # type: ignore[no-untyped-def]
    if ADD:
        part += out.load([row, column]).to(tl.float32)
    out.store([row, column], part.to(out.dtype))


# Counts of columns differ from block to block; compiling anew for a round number would cost more than it gains.
@triton.jit(do_not_specialize=["columns", "depth", "programs"])  # type: ignore[untyped-decorator]
def _of_rows(  # type: ignore[no-untyped-def]
    left, right, out, count, columns, depth, programs,
    TRANSPOSED: tl.constexpr, ADD: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    tiles_of_rows, tiles_of_columns = tl.cdiv(tl.load(count).to(tl.int32), ROWS), tl.cdiv(columns, COLUMNS)
    steps = tl.maximum(tl.cdiv(depth, DEPTH), 1)
    tl.assume(steps > 0)
    for tile in tl.range(tl.program_id(0), tiles_of_rows * tiles_of_columns, programs, flatten=True):
        tile_row, tile_column = _place(tile, tiles_of_rows, tiles_of_columns, GROUP)
        row, column = tile_row * ROWS, tile_column * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(steps):
            a = left.load([row, step * DEPTH])
            if TRANSPOSED:  # noqa: SIM108 - Triton compiles one branch of this, and both of an expression
                b = right.load([column, step * DEPTH]).T
            else:
                b = right.load([step * DEPTH, column])
            total = tl.dot(a, b, total)
        _write(out, row, column, total, ADD, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["height", "width", "programs"])  # type: ignore[untyped-decorator]
def _over_rows(  # type: ignore[no-untyped-def]
    left, right, out, count, height, width, programs,
    ADD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    # One step at least, of zeros, and said so: the two loops become one where the inner one is never empty.
    steps = tl.maximum(tl.cdiv(tl.load(count).to(tl.int32), DEPTH), 1)
    tl.assume(steps > 0)
    tiles_of_rows, tiles_of_columns = tl.cdiv(height, ROWS), tl.cdiv(width, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles_of_rows * tiles_of_columns, programs, flatten=True):
        tile_row, tile_column = _place(tile, tiles_of_rows, tiles_of_columns, GROUP)
        row, column = tile_row * ROWS, tile_column * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(steps):
            a = left.load([step * DEPTH, row])
            b = right.load([step * DEPTH, column])
            total = tl.dot(a.T, b, total)
        _write(out, row, column, total, ADD, ROWS, COLUMNS)


# Rows that are chosen have no descriptor on Hopper. `depth` and `width` are those of all calls of a model, and what divides
# them says how much a thread may read at once.
@triton.jit(do_not_specialize=["columns", "programs"])  # type: ignore[untyped-decorator]
def _of_chosen_rows(  # type: ignore[no-untyped-def]
    left, stride, order, right, out, count, columns, depth, programs,
    TRANSPOSED: tl.constexpr, WHOLE: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    counted = tl.load(count).to(tl.int32)
    tiles_of_rows, tiles_of_columns = tl.cdiv(counted, ROWS), tl.cdiv(columns, COLUMNS)
    steps = tl.maximum(tl.cdiv(depth, DEPTH), 1)
    tl.assume(steps > 0)
    for tile in tl.range(tl.program_id(0), tiles_of_rows * tiles_of_columns, programs):
        tile_row, tile_column = _place(tile, tiles_of_rows, tiles_of_columns, GROUP)
        row, column = tile_row * ROWS, tile_column * COLUMNS
        at = row + tl.arange(0, ROWS)
        source = tl.load(order + at, mask=at < counted, other=0)  # what row 0 gives after the last one is not read
        start = left + source[:, None] * stride + tl.arange(0, DEPTH)[None, :]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(steps):
            if WHOLE:
                a = tl.load(start + step * DEPTH)
            else:
                a = tl.load(start + step * DEPTH, mask=(step * DEPTH + tl.arange(0, DEPTH) < depth)[None, :], other=0.0)
            if TRANSPOSED:  # noqa: SIM108 - Triton compiles one branch of this, and both of an expression
                b = right.load([column, step * DEPTH]).T
            else:
                b = right.load([step * DEPTH, column])
            total = tl.dot(a, b, total)
        _write(out, row, column, total, False, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["height", "programs"])  # type: ignore[untyped-decorator]
def _over_chosen_rows(  # type: ignore[no-untyped-def]
    left, right, stride, order, out, count, height, width, programs,
    ADD: tl.constexpr, WHOLE: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    counted = tl.load(count).to(tl.int32)
    steps = tl.maximum(tl.cdiv(counted, DEPTH), 1)
    tl.assume(steps > 0)
    tiles_of_rows, tiles_of_columns = tl.cdiv(height, ROWS), tl.cdiv(width, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles_of_rows * tiles_of_columns, programs):
        tile_row, tile_column = _place(tile, tiles_of_rows, tiles_of_columns, GROUP)
        row, column = tile_row * ROWS, tile_column * COLUMNS
        across = column + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(steps):
            at = step * DEPTH + tl.arange(0, DEPTH)
            source = tl.load(order + at, mask=at < counted, other=0)
            here = (at < counted)[:, None]
            if not WHOLE:
                here = here & (across < width)[None, :]
            a = left.load([step * DEPTH, row])
            b = tl.load(right + source[:, None] * stride + across[None, :], mask=here, other=0.0)
            total = tl.dot(a.T, b, total)
        _write(out, row, column, total, ADD, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["columns"])  # type: ignore[untyped-decorator]
def _sum_of_rows(  # type: ignore[no-untyped-def]
    matrix, stride, count, out, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    counted = tl.load(count)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, counted, ROWS):
        row = start + tl.arange(0, ROWS)
        total += tl.load(
            matrix + row.to(tl.int64)[:, None] * stride + column[None, :],
            mask=(row < counted)[:, None] & (column < columns)[None, :],
            other=0.0,
        ).to(tl.float32)
    tl.store(out + column, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=column < columns)
