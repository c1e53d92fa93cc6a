"""The device code of the index scores: see `in_triton`, which launches it.

`q`, `weights` and `k` are (queries, batch, heads, dim), (batch, heads, queries) and (keys, batch, dim), a gradient is
(batch, queries, keys); `x_row`, `x_batch` and `x_head` are strides in elements. In the backward q and k are contiguous.
A sum leaves the tensor cores before it is weighted or stored, and every index that meets a stride has 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether functions run in Triton's interpreter, on CPU tensors."""


@triton.jit
def _dot(left, right):
    # The interpreter multiplies the bit patterns of bfloat16; as float32 the products are as exact.
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right)


@triton.jit
def _load(pointers, inside, WHOLE: tl.constexpr):
    """Load a tile, with a mask only where one is needed: in the loop over heads masks cost a tenth of the time."""
    if WHOLE:
        return tl.load(pointers)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _exponent(peak):
    """Return the biased exponent of the power of two that brings a peak just below 2**14; of 1 if it is not finite."""
    biased = (peak.to(tl.int32, bitcast=True) >> 23) & 255
    return tl.where(biased == 255, 127, tl.minimum(267 - biased, 253))


@triton.jit
def _power(exponent):
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scale(peak):
    return _power(_exponent(peak))


@triton.jit
def _unscaled(value, exponent):
    """Return value times the inverse of a product of scales, given the sum of their exponents.

    In two steps: the inverse of a product may be out of float32's range where the result is not.
    """
    first = tl.minimum(tl.maximum(-exponent, -126), 127)
    second = tl.minimum(tl.maximum(-exponent - first, -126), 127)
    return value * _power(first + 127) * _power(second + 127)


@triton.jit
def to_half(x, half, peak, rows, heads, dim, x_row, x_batch, x_head, DIM: tl.constexpr, ROWS: tl.constexpr):
    """Write (rows, batch, heads, dim), scaled by its peak, as contiguous float16."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    row = ((tl.program_id(0) // heads) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    d = tl.arange(0, DIM)[None, :]
    inside = (row < rows) & (d < dim)
    value = tl.load(x + batch * x_batch + head * x_head + row * x_row + d, mask=inside, other=0.0)
    place = half + ((row * tl.num_programs(1) + batch) * heads + head) * dim + d
    tl.store(place, (value.to(tl.float32) * _scale(tl.load(peak))).to(tl.float16), mask=inside)


@triton.jit
def score_tiles(
    q,
    weights,
    k,
    starts,
    ends,
    out,
    queries,
    keys,
    heads,
    dim,
    q_row,
    q_batch,
    q_head,
    k_row,
    k_batch,
    w_batch,
    one,
    RELU: tl.constexpr,
    BOUNDED: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    FULL: tl.constexpr,
    ADD: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the scores of a few tiles, one below the other, float32; with ADD, add them to the present values.

    Over heads, the products leave the tensor cores and are added up here. BOUNDED: tiles that lie outside the bounds of all
    their rows, from `starts` to before `ends`, (queries,), are skipped.
    """
    column_tiles = tl.cdiv(keys, COLUMNS)
    program = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    left = (program % column_tiles) * COLUMNS
    columns = left + tl.arange(0, COLUMNS)
    d = tl.arange(0, DIM)
    k_tile = k + batch * k_batch + tl.minimum(columns, keys - 1).to(tl.int64)[None, :] * k_row
    key = _load(k_tile + d[:, None], d[:, None] < dim, FULL)
    if REST > 0:
        e = DIM + tl.arange(0, REST)
        key_rest = _load(k_tile + e[:, None], e[:, None] < dim, FULL)
    first = (program // column_tiles) * TILES
    for tile in range(first, first + TILES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        # Rows past the end read the last one again and are not stored: that costs less than a mask in the loop.
        inside = tl.minimum(rows, queries - 1).to(tl.int64)
        q_tile = q + batch * q_batch + inside[:, None] * q_row
        w_tile = weights + batch * w_batch + inside
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        some = heads
        if BOUNDED:
            start, end = tl.load(starts + inside), tl.load(ends + inside)
            is_seen = (start < end) & (left < end) & (left + COLUMNS > start)
            some = tl.where(tl.max(is_seen.to(tl.int32), axis=0) > 0, heads, 0)
        for _ in range(some):
            product = _dot(_load(q_tile + d[None, :], d[None, :] < dim, FULL), key)
            if REST > 0:
                rest = _dot(_load(q_tile + e[None, :], e[None, :] < dim, FULL), key_rest)
                # Tensor cores truncate their addends; a sum outside them is rounded. The compiler would give a plain + to them.
                product = tl.fma(rest, one, product)
            if RELU:
                product = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)
            total += product * tl.load(w_tile)[:, None]
            q_tile += q_head
            w_tile += queries
        place = out + (batch * queries + inside[:, None]) * keys + columns[None, :]
        inside_out = (rows < queries)[:, None] & (columns < keys)[None, :]
        if BOUNDED:
            inside_out = inside_out & (some > 0)
        if ADD:
            total += tl.load(place, mask=inside_out, other=0.0)
        tl.store(place, total, mask=inside_out, eviction_policy="evict_first")


@triton.jit
def find_peaks(grad, peaks, queries, keys, g_batch, g_row, SQUARE: tl.constexpr, WIDE: tl.constexpr):
    """Write the largest magnitude of each square of a gradient; infinity where there is a NaN."""
    batch = tl.program_id(2).to(tl.int64)
    across = tl.cdiv(keys, SQUARE)
    rows = tl.program_id(0) * SQUARE + tl.arange(0, SQUARE)
    row = grad + batch * g_batch + rows.to(tl.int64)[:, None] * g_row
    out = peaks + (batch * tl.num_programs(0) + tl.program_id(0)) * across
    for step in range(WIDE):
        square = tl.program_id(1) * WIDE + step
        columns = square * SQUARE + tl.arange(0, SQUARE)
        inside = (rows < queries)[:, None] & (columns < keys)[None, :]
        value = tl.abs(tl.load(row + columns[None, :], mask=inside, other=0.0))
        value = tl.where(value == value, value, float("inf"))
        tl.store(out + square, tl.max(tl.max(value, axis=1), axis=0), mask=square < across)


@triton.jit
def query_side(
    grad,
    peaks,
    q,
    weights,
    k,
    q_peak,
    k_peak,
    w_peak,
    of_q,
    of_weights,
    queries,
    batches,
    keys,
    heads,
    dim,
    g_batch,
    g_row,
    RELU: tl.constexpr,
    DIM: tl.constexpr,
    SQUARE: tl.constexpr,
    SQUARES_DOWN: tl.constexpr,
    SQUARES_ACROSS: tl.constexpr,
    FULL: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the gradients of q and of the weights of some queries of one head."""
    # Heads are side by side, so that those in flight share the tiles of grad in the cache. The last rows come first:
    # under a causal mask they have the most to do.
    tl.static_assert(ROWS == SQUARE)
    head = tl.program_id(0) % heads
    row_tiles = tl.num_programs(0) // heads
    row_tile = row_tiles - 1 - tl.program_id(0) // heads
    batch = tl.program_id(1).to(tl.int64)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    # Rows past the end read the last one again and are not stored: that costs less than a mask in the loop.
    inside = tl.minimum(rows, queries - 1).to(tl.int64)
    place = ((inside * batches + batch) * heads + head)[:, None] * dim
    d = tl.arange(0, DIM)[None, :]
    query = tl.load(q + place + d, mask=d < dim, other=0.0)
    across = tl.cdiv(keys, SQUARE)
    square = tl.arange(0, SQUARES_ACROSS)
    peak = tl.load(peaks + (batch * row_tiles + row_tile) * across + square, mask=square < across, other=0.0)
    begin = tl.min(tl.where(peak > 0, square, across), axis=0) * SQUARE
    end = tl.minimum(tl.max(tl.where(peak > 0, square + 1, 0), axis=0) * SQUARE, keys)
    g_peak = tl.max(peak, axis=0)
    column = tl.arange(0, COLUMNS)
    g_tile = grad + batch * g_batch + inside[:, None] * g_row + begin + column[None, :]
    k_row = tl.full((), 1, tl.int64) * batches * dim
    k_tile = k + batch * dim + (begin + column)[:, None] * k_row + d
    g_scale = _scale(g_peak)
    total = tl.zeros((ROWS, DIM), dtype=tl.float32)
    weight_total = tl.zeros((ROWS,), dtype=tl.float32)
    for first in range(begin, end, COLUMNS):
        left = column < keys - first
        key = _load(k_tile, left[:, None] & (d < dim), FULL and WHOLE)
        above = _load(g_tile, left[None, :], WHOLE)
        product = tl.dot(query, tl.trans(key))
        # The gate multiplies, as upstream's does, so that a NaN behind a closed one is not lost.
        if RELU:
            above *= tl.where(product > 0, g_scale, 0.0)
        else:
            above *= g_scale
        weight_total += tl.sum(above * product, axis=1)
        high = above.to(tl.float16)
        total += tl.dot(high, key)
        total += tl.dot((above - high.to(tl.float32)).to(tl.float16), key)
        k_tile += COLUMNS * k_row
        g_tile += COLUMNS
    exponent = _exponent(g_peak) + _exponent(tl.load(k_peak)) - 2 * 127
    weight = tl.load(weights + (batch * heads + head) * queries + inside)
    total = _unscaled(total, exponent) * weight[:, None]
    tl.store(of_q + place + d, total.to(of_q.dtype.element_ty), mask=(rows < queries)[:, None] & (d < dim))
    weight_total = _unscaled(weight_total, exponent + _exponent(tl.load(q_peak)) - 127)
    place = (inside * batches + batch) * heads + head
    tl.store(of_weights + place, weight_total.to(of_weights.dtype.element_ty), mask=rows < queries)


@triton.jit
def key_side(
    grad,
    peaks,
    q,
    weights,
    k,
    q_peak,
    k_peak,
    w_peak,
    of_k,
    queries,
    batches,
    keys,
    heads,
    dim,
    g_batch,
    g_row,
    RELU: tl.constexpr,
    DIM: tl.constexpr,
    SQUARE: tl.constexpr,
    SQUARES_DOWN: tl.constexpr,
    SQUARES_ACROSS: tl.constexpr,
    FULL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the gradient of some keys, from a part of the queries, float32."""
    tl.static_assert(ROWS == SQUARE and COLUMNS % SQUARE == 0)
    batch = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    d = tl.arange(0, DIM)[None, :]
    column = tl.minimum(columns, keys - 1).to(tl.int64)
    key = tl.load(k + (column * batches + batch)[:, None] * dim + d, mask=d < dim, other=0.0)

    down = tl.cdiv(queries, SQUARE)
    across = tl.cdiv(keys, SQUARE)
    square = tl.arange(0, SQUARES_DOWN)
    peak = tl.zeros((SQUARES_DOWN,), dtype=tl.float32)
    for step in tl.static_range(COLUMNS // SQUARE):
        at = tl.program_id(0) * (COLUMNS // SQUARE) + step
        # One condition, as the interpreter of Triton 3.9 makes a number of one that is not about a block.
        here = square < tl.where(at < across, down, 0)
        peak = tl.maximum(peak, tl.load(peaks + (batch * down + square) * across + at, mask=here, other=0.0))
    begin = tl.min(tl.where(peak > 0, square, down), axis=0)
    end = tl.max(tl.where(peak > 0, square + 1, 0), axis=0)
    g_peak = tl.max(peak, axis=0)
    share = tl.cdiv(tl.maximum(end - begin, 0), tl.num_programs(2))
    begin += tl.program_id(2) * share
    end = tl.minimum(end, begin + share)

    g_scale = _scale(g_peak)
    # A product of two numbers below 2**14 is brought below 2**14 again.
    w_scale = _scale(tl.load(w_peak)) * 2.0**-14
    total = tl.zeros((COLUMNS, DIM), dtype=tl.float32)
    for row_tile in tl.range(begin, end, flatten=True):
        rows = row_tile * ROWS + tl.arange(0, ROWS)
        inside = tl.minimum(rows, queries - 1).to(tl.int64)
        in_grad = (rows < queries)[:, None] & (columns < keys)[None, :]
        g_tile = grad + batch * g_batch + inside[:, None] * g_row + columns[None, :]
        above = tl.trans(tl.load(g_tile, mask=in_grad, other=0.0)) * g_scale
        q_tile = q + ((inside * batches + batch) * heads)[:, None] * dim + d
        w_tile = weights + batch * heads * queries + inside
        for _ in range(heads):
            query = _load(q_tile, d < dim, FULL)
            live = above * (tl.load(w_tile) * w_scale)[None, :]
            if RELU:  # a product here too; other ways to write it are up to six times slower
                live *= (tl.dot(key, tl.trans(query)) > 0).to(tl.float32)
            total += tl.dot(live.to(tl.float16), query)
            q_tile += dim
            w_tile += queries
    exponent = _exponent(g_peak) + _exponent(tl.load(q_peak)) + _exponent(tl.load(w_peak)) - 3 * 127 - 14
    total = _unscaled(total, exponent)
    place = ((tl.program_id(2) * keys + column) * batches + batch)[:, None] * dim
    tl.store(of_k + place + d, total, mask=(columns < keys)[:, None] & (d < dim))
