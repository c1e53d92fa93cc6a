"""Products whose number of rows only the device knows, in Triton; see `products`.

A program takes tile after tile of the result, as many as the rows make, and a tile is summed in one order by one
program: the same rows give the same bits. Tiles travel through tensor descriptors, which are the bulk copies of
Hopper and Blackwell and plain reads elsewhere.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from megacpp_overlays.kernels.masked_products.launches import Launches
from megacpp_overlays.kernels.masked_products.launches_triton import wait_for_what_is_ahead
from megacpp_overlays.kernels.masked_products.panels import WHOLE, Panels
from megacpp_overlays.kernels.masked_products.panels_triton import group_of

_GROUP = 16
"""Tiles of rows in a strip, whose programs run at one time and share what they read in the L2 cache.

With 132 programs and tiles of 128 rows and 256 columns, 16 of them read least: about as many rows as columns.
"""
_SUMMED_ROWS, _SUMMED_COLUMNS = 64, 64
"""What a program adds up at a time; its lanes meet once, at the end."""
_ALIGNMENT = 16
"""Bytes, of a descriptor's start and of its rows."""
_WHOLE = tl.constexpr(WHOLE)


class Tile(NamedTuple):
    """How the programs of a product work."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int


_LARGE = Tile(128, 256, 64, 3, 8)
_SMALL = Tile(128, 128, 32, 3, 8)
_SHARED_BY_LARGE = 180_264
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


def wave_of(device: torch.device) -> tuple[int, int, int]:
    """Return the rows and columns of a tile, and how many tiles are computed at one time."""
    tile = _largest(device)
    return tile.rows, tile.columns, _multiprocessors(device)


def product_of_rows(
    left: torch.Tensor,
    right: torch.Tensor,
    count: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    order: torch.Tensor | None = None,
) -> None:
    """See `products.Products.of_rows`."""
    if left.shape[0] and right.shape[1]:
        products_of_rows(left, right, count, out, add, order)(0)


def products_of_rows(
    left: torch.Tensor,
    right: torch.Tensor,
    count: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    order: torch.Tensor | None = None,
    panels: Panels | None = None,
    *,
    deep: bool = False,
) -> Launches:
    """Return what computes such a product: for each group of panels if there are any, else once, as group 0.

    Args:
        left: see `products.Products.of_rows`, as are those that follow; `right` is that of all panels.
        right: (k, n), not empty.
        count: (1,), int32.
        out: (m, n).
        add: in the dtype of `out`.
        order: (m,), int64.
        panels: of `right`.
        deep: whether panels are on the left, one below the other, and their products are added up; else in the result.
    """
    rows, depth = left.shape
    if panels is not None and deep:
        depth = panels.classes
    columns = right.shape[1]
    tile = _largest(left.device)
    transposed = right.stride(0) == 1
    grid = (_programs(rows, columns, tile, left.device), 1)

    def part(width: int) -> TensorDescriptor:
        return _descriptor(right.t(), width, tile.depth) if transposed else _descriptor(right, tile.depth, width)

    arguments = {
        "right": part(tile.columns), "out": _descriptor(out, tile.rows, tile.columns // 4),
        "count": count, "columns": columns, "depth": depth, "programs": grid[0],
        **_cut(panels, count, rows, depth if deep else columns),
        "TRANSPOSED": transposed, "GROUP": _GROUP, "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth,
    }  # fmt: skip
    if order is not None:
        arguments |= {"left": left, "stride": left.stride(0), "order": order, "WHOLE": depth % tile.depth == 0}
        return Launches(
            _of_chosen_rows, grid, "group", arguments, left.device, num_stages=tile.stages, num_warps=tile.warps
        )
    arguments |= {
        "left": _descriptor(left, tile.rows, tile.depth), "half": part(tile.columns // 2), **_adding(out, add), "DEEP": deep
    }  # fmt: skip
    return Launches(_of_rows, grid, "group", arguments, left.device, num_stages=tile.stages, num_warps=tile.warps)


def product_over_rows(
    left: torch.Tensor,
    right: torch.Tensor,
    count: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    order: torch.Tensor | None = None,
) -> None:
    """See `products.Products.over_rows`."""
    if left.shape[0] and out.numel():
        products_over_rows(left, right, count, out, add, order)(0)
    elif not add:
        out.zero_()


def products_over_rows(
    left: torch.Tensor,
    right: torch.Tensor,
    count: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    order: torch.Tensor | None = None,
    panels: Panels | None = None,
) -> Launches:
    """Return what computes such a product: for each group of panels if there are any, else once, as group 0.

    Args:
        left: see `products.Products.over_rows`, as are those that follow.
        right: (k, n), not empty.
        count: (1,), int32.
        out: (m, n), that of all panels.
        add: in the dtype of `out`.
        order: (k,), int64.
        panels: on the left, one below the other; in the result, one after the other.
    """
    height, width = out.shape
    tile = _largest(left.device)
    grid = (_programs(height, width, tile, left.device), 1)
    arguments = {
        "left": _descriptor(left, tile.depth, tile.rows), "out": _descriptor(out, tile.rows, tile.columns // 4),
        "count": count, "height": height, "across": width, "programs": grid[0],
        **_cut(panels, count, left.shape[0], height), **_adding(out, add),
        "GROUP": _GROUP, "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth,
    }  # fmt: skip
    if order is not None:
        arguments |= {"right": right, "stride": right.stride(0), "order": order, "WHOLE": width % tile.columns == 0}
        return Launches(
            _over_chosen_rows, grid, "group", arguments, left.device, num_stages=tile.stages, num_warps=tile.warps
        )
    arguments |= {
        "right": _descriptor(right, tile.depth, tile.columns), "half": _descriptor(right, tile.depth, tile.columns // 2)
    }  # fmt: skip
    return Launches(_over_rows, grid, "group", arguments, left.device, num_stages=tile.stages, num_warps=tile.warps)


def sum_of_rows(matrix: torch.Tensor, count: torch.Tensor, out: torch.Tensor) -> None:
    """See `products.Products.sum_rows`."""
    if matrix.numel():
        sums_of_rows(matrix, count, out)(0)
    else:
        out.zero_()


def sums_of_rows(
    matrix: torch.Tensor, count: torch.Tensor, out: torch.Tensor, panels: Panels | None = None
) -> Launches:
    """Return what computes such a sum: for each group of panels if there are any, else once, as group 0.

    Args:
        matrix: see `products.Products.sum_rows`; panels are one below the other.
        count: (1,), int32.
        out: (n,), that of all panels.
        panels: of the matrix.
    """
    columns = out.shape[0]
    arguments = {
        "matrix": matrix, "stride": matrix.stride(0), "count": count, "out": out, "columns": columns,
        **_cut(panels, count, matrix.shape[0], columns),
        "ROWS": _SUMMED_ROWS, "COLUMNS": _SUMMED_COLUMNS,
    }  # fmt: skip
    return Launches(
        _sum_of_rows, (triton.cdiv(columns, _SUMMED_COLUMNS), 1), "group", arguments, matrix.device, num_warps=8
    )


def _cut(panels: Panels | None, count: torch.Tensor, rows: int, classes: int) -> dict[str, torch.Tensor | int]:
    """Return what programs are told of panels; without them everything is one."""
    if panels is None:
        return {"laid": count, "rows": rows, "width": classes, "panels": 1, "most": 1}
    return {
        "laid": panels.laid, "rows": rows, "width": panels.width, "panels": panels.number, "most": panels.most
    }  # fmt: skip


def _adding(out: torch.Tensor, add: bool) -> dict[str, bool]:
    """Return how programs add to a result: float32 where it lies, without reading it, as Triton's interpreter cannot."""
    return {"ADD": add, "THERE": add and out.dtype == torch.float32 and isinstance(_of_rows, triton.JITFunction)}


@functools.cache
def _largest(device: torch.device) -> Tile:
    if device.type != "cuda":
        return _SMALL
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return _LARGE if shared >= _SHARED_BY_LARGE else _SMALL


def _programs(rows: int, columns: int, tile: Tile, device: torch.device) -> int:
    tiles: int = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    if device.type != "cuda":
        return tiles
    return min(2 * tiles, _multiprocessors(device))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    number: int = torch.cuda.get_device_properties(device).multi_processor_count
    return number


def _descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


@triton.jit  # type: ignore[untyped-decorator]
def _place(tile, tiles_of_rows, tiles_of_columns, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    strip = tile // (GROUP * tiles_of_columns)
    # Loops that became one look at a tile after the last, where no row is left to divide by.
    height = tl.maximum(tl.minimum(tiles_of_rows - strip * GROUP, GROUP), 1)
    inside = tile % (GROUP * tiles_of_columns)
    return strip * GROUP + inside % height, inside // height


@triton.jit
def _whole_tiles(tiles, programs):  # type: ignore[no-untyped-def]
    """Return how many tiles are computed whole; the others, too few for more than half of the programs, in halves."""
    rest = tiles % programs
    return tl.where(2 * rest <= programs, tiles - rest, tiles)


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    out, row, column, total, ADD: tl.constexpr, THERE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    left, right = _halves(total, ROWS, COLUMNS)
    _write_half(out, row, column, left, ADD, THERE, ROWS, COLUMNS // 2)
    _write_half(out, row, column + COLUMNS // 2, right, ADD, THERE, ROWS, COLUMNS // 2)


@triton.jit  # type: ignore[untyped-decorator]
def _write_half(  # type: ignore[no-untyped-def]
    out, row, column, total, ADD: tl.constexpr, THERE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    # In parts: a whole tile in float32 has no room in shared memory beside what is read ahead.
    left, right = _halves(total, ROWS, COLUMNS)
    _write_part(out, row, column, left, ADD, THERE)
    _write_part(out, row, column + COLUMNS // 2, right, ADD, THERE)


@triton.jit  # type: ignore[untyped-decorator]
def _halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    left, right = tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
    return left, right


@triton.jit  # type: ignore[untyped-decorator]
def _write_part(out, row, column, part, ADD: tl.constexpr, THERE: tl.constexpr):  # type: ignore[no-untyped-def]
    if THERE:
        # By the copy engine, so that no warp waits for what is there. One program writes a tile: the order is one.
        out.atomic_add([row, column], part)
    else:
        if ADD:
            part += out.load([row, column]).to(tl.float32)
        out.store([row, column], part.to(out.dtype))


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_rows_at(  # type: ignore[no-untyped-def]
    left, right, row, column, start, steps, per_panel, height,
    TRANSPOSED: tl.constexpr, DEEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    top, inside = row, 0
    for step in range(steps):
        if DEEP:
            a = left.load([top, inside * DEPTH])
            # Counted, not divided: this loop is the product itself.
            inside += 1
            top = tl.where(inside == per_panel, top + height, top)
            inside = tl.where(inside == per_panel, 0, inside)
            if TRANSPOSED:
                b = right.load([column, start + step * DEPTH]).T
            else:
                b = right.load([start + step * DEPTH, column])
        else:
            a = left.load([row, step * DEPTH])
            if TRANSPOSED:
                b = right.load([start + column, step * DEPTH]).T
            else:
                b = right.load([step * DEPTH, start + column])
        total = tl.dot(a, b, total)
    return total


# Counts of columns differ from block to block; compiling anew for a round number would cost more than it gains.
@triton.jit(do_not_specialize=["columns", "depth", "programs", "rows", "width", "panels", "most", "group"])  # type: ignore[untyped-decorator]
def _of_rows(  # type: ignore[no-untyped-def]
    left, right, half, out, count, columns, depth, programs, laid, rows, width, panels, most, group,
    TRANSPOSED: tl.constexpr, ADD: tl.constexpr, THERE: tl.constexpr, DEEP: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_what_is_ahead(EARLY)
    first, here, height = group_of(laid, rows, panels, most, group, _WHOLE)
    start = first * width
    if DEEP:
        depth = tl.maximum(tl.minimum(depth - start, here * width), 0)
        tiles_of_columns = tl.where(here > 0, tl.cdiv(columns, COLUMNS), 0)
        per_panel = tl.cdiv(width, DEPTH)
    else:
        tiles_of_columns = tl.cdiv(tl.maximum(tl.minimum(columns - start, here * width), 0), COLUMNS)
        per_panel = tl.cdiv(width, COLUMNS)
    tiles_of_rows = tl.cdiv(tl.load(count).to(tl.int32), ROWS)
    steps = tl.maximum(tl.cdiv(depth, DEPTH), 1)
    tl.assume(steps > 0)
    tiles = tiles_of_rows * tiles_of_columns
    whole = _whole_tiles(tiles, programs)
    for tile in tl.range(tl.program_id(0), whole, programs, flatten=True):
        tile_row, tile_column = _place(tile, tiles_of_rows, tiles_of_columns, GROUP)
        row, column = tile_row * ROWS, tile_column * COLUMNS
        total = _sum_of_rows_at(
            left, right, row, column, start, steps, per_panel, height, TRANSPOSED, DEEP, ROWS, COLUMNS, DEPTH
        )
        if not DEEP:
            panel = tile_column // per_panel
            row, column = panel * height + row, column - panel * per_panel * COLUMNS
        _write(out, row, column, total, ADD, THERE, ROWS, COLUMNS)
    if tl.program_id(0) < 2 * (tiles - whole):
        tile_row, tile_column = _place(whole + tl.program_id(0) // 2, tiles_of_rows, tiles_of_columns, GROUP)
        row, column = tile_row * ROWS, tile_column * COLUMNS + tl.program_id(0) % 2 * (COLUMNS // 2)
        total = _sum_of_rows_at(
            left, half, row, column, start, steps, per_panel, height, TRANSPOSED, DEEP, ROWS, COLUMNS // 2, DEPTH
        )
        if not DEEP:
            panel = tile_column // per_panel
            row, column = panel * height + row, column - panel * per_panel * COLUMNS
        _write_half(out, row, column, total, ADD, THERE, ROWS, COLUMNS // 2)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_over_rows_at(  # type: ignore[no-untyped-def]
    left, right, top, row, column, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(steps):
        a = left.load([top + step * DEPTH, row])
        b = right.load([step * DEPTH, column])
        total = tl.dot(a.T, b, total)
    return total


@triton.jit(do_not_specialize=["height", "across", "programs", "rows", "width", "panels", "most", "group"])  # type: ignore[untyped-decorator]
def _over_rows(  # type: ignore[no-untyped-def]
    left, right, half, out, count, height, across, programs, laid, rows, width, panels, most, group,
    ADD: tl.constexpr, THERE: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_what_is_ahead(EARLY)
    first, here, apart = group_of(laid, rows, panels, most, group, _WHOLE)
    start, per_panel = first * width, tl.cdiv(width, ROWS)
    # One step at least, of zeros, and said so: the two loops become one where the inner one is never empty.
    counted = tl.load(count).to(tl.int32)
    steps = tl.maximum(tl.cdiv(counted, DEPTH), 1)
    tl.assume(steps > 0)
    tiles_of_rows = tl.where(counted < 0, 0, tl.cdiv(tl.maximum(tl.minimum(height - start, here * width), 0), ROWS))
    tiles_of_columns = tl.cdiv(across, COLUMNS)
    tiles = tiles_of_rows * tiles_of_columns
    whole = _whole_tiles(tiles, programs)
    for tile in tl.range(tl.program_id(0), whole, programs, flatten=True):
        tile_row, tile_column = _place(tile, tiles_of_rows, tiles_of_columns, GROUP)
        panel = tile_row // per_panel
        top, row, column = panel * apart, (tile_row - panel * per_panel) * ROWS, tile_column * COLUMNS
        total = _sum_over_rows_at(left, right, top, row, column, steps, ROWS, COLUMNS, DEPTH)
        _write(out, start + tile_row * ROWS, column, total, ADD, THERE, ROWS, COLUMNS)
    if tl.program_id(0) < 2 * (tiles - whole):
        tile_row, tile_column = _place(whole + tl.program_id(0) // 2, tiles_of_rows, tiles_of_columns, GROUP)
        panel = tile_row // per_panel
        top, row = panel * apart, (tile_row - panel * per_panel) * ROWS
        column = tile_column * COLUMNS + tl.program_id(0) % 2 * (COLUMNS // 2)
        total = _sum_over_rows_at(left, half, top, row, column, steps, ROWS, COLUMNS // 2, DEPTH)
        _write_half(out, start + tile_row * ROWS, column, total, ADD, THERE, ROWS, COLUMNS // 2)


# Rows that are chosen have no descriptor on Hopper. `depth` and `across` are those of all calls of a model, and what divides
# them says how much a thread may read at once.
@triton.jit(do_not_specialize=["columns", "programs", "rows", "width", "panels", "most", "group"])  # type: ignore[untyped-decorator]
def _of_chosen_rows(  # type: ignore[no-untyped-def]
    left, stride, order, right, out, count, columns, depth, programs, laid, rows, width, panels, most, group,
    TRANSPOSED: tl.constexpr, WHOLE: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_what_is_ahead(EARLY)
    first, here, height = group_of(laid, rows, panels, most, group, _WHOLE)
    start, per_panel = first * width, tl.cdiv(width, COLUMNS)
    counted = tl.load(count).to(tl.int32)
    tiles_of_rows = tl.cdiv(counted, ROWS)
    tiles_of_columns = tl.cdiv(tl.maximum(tl.minimum(columns - start, here * width), 0), COLUMNS)
    steps = tl.maximum(tl.cdiv(depth, DEPTH), 1)
    tl.assume(steps > 0)
    for tile in tl.range(tl.program_id(0), tiles_of_rows * tiles_of_columns, programs):
        tile_row, tile_column = _place(tile, tiles_of_rows, tiles_of_columns, GROUP)
        row, column = tile_row * ROWS, start + tile_column * COLUMNS
        at = row + tl.arange(0, ROWS)
        source = tl.load(order + at, mask=at < counted, other=0)  # what row 0 gives after the last one is not read
        begin = left + source[:, None] * stride + tl.arange(0, DEPTH)[None, :]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(steps):
            if WHOLE:
                a = tl.load(begin + step * DEPTH)
            else:
                a = tl.load(begin + step * DEPTH, mask=(step * DEPTH + tl.arange(0, DEPTH) < depth)[None, :], other=0.0)
            if TRANSPOSED:  # noqa: SIM108 - Triton compiles one branch of this, and both of an expression
                b = right.load([column, step * DEPTH]).T
            else:
                b = right.load([step * DEPTH, column])
            total = tl.dot(a, b, total)
        panel = tile_column // per_panel
        _write(
            out, panel * height + row, (tile_column - panel * per_panel) * COLUMNS, total, False, False, ROWS, COLUMNS
        )


@triton.jit(do_not_specialize=["height", "programs", "rows", "width", "panels", "most", "group"])  # type: ignore[untyped-decorator]
def _over_chosen_rows(  # type: ignore[no-untyped-def]
    left, right, stride, order, out, count, height, across, programs, laid, rows, width, panels, most, group,
    ADD: tl.constexpr, THERE: tl.constexpr, WHOLE: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_what_is_ahead(EARLY)
    first, here, apart = group_of(laid, rows, panels, most, group, _WHOLE)
    start, per_panel = first * width, tl.cdiv(width, ROWS)
    counted = tl.load(count).to(tl.int32)
    steps = tl.maximum(tl.cdiv(counted, DEPTH), 1)
    tl.assume(steps > 0)
    tiles_of_rows = tl.where(counted < 0, 0, tl.cdiv(tl.maximum(tl.minimum(height - start, here * width), 0), ROWS))
    tiles_of_columns = tl.cdiv(across, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles_of_rows * tiles_of_columns, programs):
        tile_row, tile_column = _place(tile, tiles_of_rows, tiles_of_columns, GROUP)
        panel = tile_row // per_panel
        top, row, column = panel * apart, (tile_row - panel * per_panel) * ROWS, tile_column * COLUMNS
        beside = column + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(steps):
            at = step * DEPTH + tl.arange(0, DEPTH)
            source = tl.load(order + at, mask=at < counted, other=0)
            inside = (at < counted)[:, None]
            if not WHOLE:
                inside = inside & (beside < across)[None, :]
            a = left.load([top + step * DEPTH, row])
            b = tl.load(right + source[:, None] * stride + beside[None, :], mask=inside, other=0.0)
            total = tl.dot(a.T, b, total)
        _write(out, start + tile_row * ROWS, column, total, ADD, THERE, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["columns", "rows", "width", "panels", "most", "group"])  # type: ignore[untyped-decorator]
def _sum_of_rows(  # type: ignore[no-untyped-def]
    matrix, stride, count, out, columns, laid, rows, width, panels, most, group,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_what_is_ahead(EARLY)
    first, here, height = group_of(laid, rows, panels, most, group, _WHOLE)
    known = tl.load(count).to(tl.int32)
    end = tl.where(known < 0, 0, tl.minimum(columns - first * width, here * width))
    begin = tl.program_id(0) * COLUMNS
    panel = begin // width
    column = begin + tl.arange(0, COLUMNS)
    beside = column - panel * width
    counted = tl.where(begin < end, known, 0)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, counted, ROWS):
        row = at + tl.arange(0, ROWS)
        total += tl.load(
            matrix + (panel * height + row).to(tl.int64)[:, None] * stride + beside[None, :],
            mask=(row < counted)[:, None] & (column < end)[None, :],
            other=0.0,
        ).to(tl.float32)
    tl.store(out + first * width + column, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=column < end)
