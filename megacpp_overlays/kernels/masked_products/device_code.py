"""The device code of products whose number of rows only the device knows: see `products_triton`, which launches it."""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_overlays.kernels.masked_products.launches_triton import wait_for_what_is_ahead
from megacpp_overlays.kernels.masked_products.panels_triton import panel_group
from megacpp_overlays.kernels.masked_products.row_counts import ROW_ALIGNMENT

_ROW_ALIGNMENT = tl.constexpr(ROW_ALIGNMENT)


@triton.jit
def _place(tile, tiles_of_rows, tiles_of_columns, GROUP: tl.constexpr):
    strip = tile // (GROUP * tiles_of_columns)
    # Loops that became one look at a tile after the last, where no row is left to divide by.
    height = tl.maximum(tl.minimum(tiles_of_rows - strip * GROUP, GROUP), 1)
    inside = tile % (GROUP * tiles_of_columns)
    return strip * GROUP + inside % height, inside // height


@triton.jit
def _whole_tiles(tiles, programs):
    """Return how many tiles are computed whole; the others, too few for more than half of the programs, in halves."""
    rest = tiles % programs
    return tl.where(2 * rest <= programs, tiles - rest, tiles)


@triton.jit
def _write(out, row, column, total, ADD: tl.constexpr, THERE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    left, right = _halves(total, ROWS, COLUMNS)
    _write_half(out, row, column, left, ADD, THERE, ROWS, COLUMNS // 2)
    _write_half(out, row, column + COLUMNS // 2, right, ADD, THERE, ROWS, COLUMNS // 2)


@triton.jit
def _write_half(
    out, row, column, total, ADD: tl.constexpr, THERE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    # In parts: shared memory has no room for a whole tile in float32 and the tiles that are read ahead.
    left, right = _halves(total, ROWS, COLUMNS)
    _write_part(out, row, column, left, ADD, THERE)
    _write_part(out, row, column + COLUMNS // 2, right, ADD, THERE)


@triton.jit
def _halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    left, right = tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
    return left, right


@triton.jit
def _write_part(out, row, column, part, ADD: tl.constexpr, THERE: tl.constexpr):
    if THERE:
        # By the copy engine, so that no warp waits for the present values. One program writes a tile: there is one order.
        out.atomic_add([row, column], part)
    else:
        if ADD:
            part += out.load([row, column]).to(tl.float32)
        out.store([row, column], part.to(out.dtype))


@triton.jit
def _sum_of_rows_at(
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
@triton.jit(do_not_specialize=["columns", "depth", "programs", "rows", "width", "panels", "group_limit", "group"])
def of_rows(
    left, right, half, out, count, columns, depth, programs, planned_rows, rows, width, panels, group_limit, group,
    TRANSPOSED: tl.constexpr, ADD: tl.constexpr, THERE: tl.constexpr, DEEP: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the rows of `left @ right` that count, or add them to the present values."""
    wait_for_what_is_ahead(EARLY)
    first, here, height = panel_group(planned_rows, rows, panels, group_limit, group, _ROW_ALIGNMENT)
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


@triton.jit
def _group_of_weight(count, planned_rows, rows, width, panels, group_limit, group, height, ROWS: tl.constexpr):
    """Return where the gradient of a group's weight begins, tiles of a panel and rows between panels, all tiles, and the rows that count."""
    first, here, apart = panel_group(planned_rows, rows, panels, group_limit, group, _ROW_ALIGNMENT)
    start = first * width
    counted = tl.load(count).to(tl.int32)
    tall = tl.maximum(tl.minimum(height - start, here * width), 0)
    return start, tl.cdiv(width, ROWS), apart, tl.where(counted < 0, 0, tl.cdiv(tall, ROWS)), counted


@triton.jit
def _place_of_weight(tile, tiles_of_rows, tiles_of_columns, per_panel, apart, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return a tile's place in the result, and in the left factor the first row of its panel and the tile's first column."""
    tile_row, tile_column = _place(tile, tiles_of_rows, tiles_of_columns, GROUP)
    panel = tile_row // per_panel
    return tile_row, tile_column, panel * apart, (tile_row - panel * per_panel) * ROWS


@triton.jit
def _sum_over_rows_at(
    left, right, top, row, column, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(steps):
        a = left.load([top + step * DEPTH, row])
        b = right.load([step * DEPTH, column])
        total = tl.dot(a.T, b, total)
    return total


@triton.jit(do_not_specialize=["height", "across", "programs", "rows", "width", "panels", "group_limit", "group"])
def over_rows(
    left, right, half, out, count, height, across, programs, planned_rows, rows, width, panels, group_limit, group,
    ADD: tl.constexpr, THERE: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write `left.t() @ right` over the rows that count, or add it to the present values."""
    wait_for_what_is_ahead(EARLY)
    start, per_panel, apart, tiles_of_rows, counted = _group_of_weight(
        count, planned_rows, rows, width, panels, group_limit, group, height, ROWS
    )
    # One step at least, of zeros, and said so: the two loops become one where the inner one is never empty.
    steps = tl.maximum(tl.cdiv(counted, DEPTH), 1)
    tl.assume(steps > 0)
    tiles_of_columns = tl.cdiv(across, COLUMNS)
    tiles = tiles_of_rows * tiles_of_columns
    whole = _whole_tiles(tiles, programs)
    for tile in tl.range(tl.program_id(0), whole, programs, flatten=True):
        tile_row, tile_column, top, row = _place_of_weight(
            tile, tiles_of_rows, tiles_of_columns, per_panel, apart, GROUP, ROWS
        )
        column = tile_column * COLUMNS
        total = _sum_over_rows_at(left, right, top, row, column, steps, ROWS, COLUMNS, DEPTH)
        _write(out, start + tile_row * ROWS, column, total, ADD, THERE, ROWS, COLUMNS)
    if tl.program_id(0) < 2 * (tiles - whole):
        tile_row, tile_column, top, row = _place_of_weight(
            whole + tl.program_id(0) // 2, tiles_of_rows, tiles_of_columns, per_panel, apart, GROUP, ROWS
        )
        column = tile_column * COLUMNS + tl.program_id(0) % 2 * (COLUMNS // 2)
        total = _sum_over_rows_at(left, half, top, row, column, steps, ROWS, COLUMNS // 2, DEPTH)
        _write_half(out, start + tile_row * ROWS, column, total, ADD, THERE, ROWS, COLUMNS // 2)


# Chosen rows have no descriptor on Hopper. `depth` and `across` are the same in all calls of a model, and their divisors
# determine how much a thread may read at once.
@triton.jit(do_not_specialize=["columns", "programs", "rows", "width", "panels", "group_limit", "group"])
def of_chosen_rows(
    left, stride, order, right, out, count, columns, depth, programs, planned_rows, rows, width, panels, group_limit, group,
    TRANSPOSED: tl.constexpr, WHOLE: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write `left @ right` for rows of `left` that `order` names."""
    wait_for_what_is_ahead(EARLY)
    first, here, height = panel_group(planned_rows, rows, panels, group_limit, group, _ROW_ALIGNMENT)
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
        source = tl.load(order + at, mask=at < counted, other=0)  # the results of row 0 after the last one are not read
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


@triton.jit(do_not_specialize=["height", "programs", "rows", "width", "panels", "group_limit", "group"])
def over_chosen_rows(
    left, right, stride, order, out, count, height, across, programs, planned_rows, rows, width, panels, group_limit, group,
    ADD: tl.constexpr, THERE: tl.constexpr, WHOLE: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write `left.t() @ right`, or add it, for rows of `right` that `order` names."""
    wait_for_what_is_ahead(EARLY)
    start, per_panel, apart, tiles_of_rows, counted = _group_of_weight(
        count, planned_rows, rows, width, panels, group_limit, group, height, ROWS
    )
    steps = tl.maximum(tl.cdiv(counted, DEPTH), 1)
    tl.assume(steps > 0)
    tiles_of_columns = tl.cdiv(across, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles_of_rows * tiles_of_columns, programs):
        tile_row, tile_column, top, row = _place_of_weight(
            tile, tiles_of_rows, tiles_of_columns, per_panel, apart, GROUP, ROWS
        )
        column = tile_column * COLUMNS
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


@triton.jit(do_not_specialize=["columns", "rows", "width", "panels", "group_limit", "group"])
def sum_of_rows(
    matrix, stride, count, out, columns, planned_rows, rows, width, panels, group_limit, group,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the sum of the rows that count."""
    wait_for_what_is_ahead(EARLY)
    first, here, height = panel_group(planned_rows, rows, panels, group_limit, group, _ROW_ALIGNMENT)
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
