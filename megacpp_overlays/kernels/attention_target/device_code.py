"""The device code of the attention target: see `in_triton`, which launches it.

`query` and `key` are (queries, batch, heads, dim) and (keys, batch, heads, dim), the bounds (1 or batch, queries), the mask
and the flags of allowed keys (1 or batch, queries, keys). `x_row`, `x_batch` and `x_head` are strides in elements, 0 where one
slice serves all. The last axis has unit stride. Every index that is multiplied by a stride has 64 bits. `mask_matters` is one
number, 0 if the mask changes nothing within the bounds. `chosen` is 0 if there are no flags of allowed keys. It is a number and
not a constant, so both cases run the same machine code: flags that allow every key give the same bits as no flags.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether functions run in Triton's interpreter, on CPU tensors."""
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _dot(left, right, total):
    # The interpreter multiplies the bit patterns of bfloat16; as float32 the products are as exact.
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    return tl.dot(left, right, total)


@triton.jit
def _load(pointers, inside, WHOLE: tl.constexpr):
    """Load a tile, with a mask only where one is needed."""
    if WHOLE:
        return tl.load(pointers)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _add_chunk(total, q_tile, k_tile, first, dim, CHUNK: tl.constexpr, FULL: tl.constexpr):
    """Add the products of a part of the head dimension."""
    d = first + tl.arange(0, CHUNK)
    left = _load(q_tile + d[None, :], d[None, :] < dim, FULL)
    right = _load(k_tile + d[:, None], d[:, None] < dim, FULL)
    return _dot(left, right, total)


@triton.jit
def _products(
    q_tile,
    k_tile,
    dim,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FULL: tl.constexpr,
    UNROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the products of some queries and keys, given where each of them starts."""
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if UNROLLED:
        for chunk in tl.static_range(CHUNKS):
            total = _add_chunk(total, q_tile, k_tile, chunk * CHUNK, dim, CHUNK, FULL)
    else:
        for chunk in range(CHUNKS):
            total = _add_chunk(total, q_tile, k_tile, chunk * CHUNK, dim, CHUNK, FULL)
    return total


@triton.jit
def _exp(x):
    return tl.exp2(x * _LOG2E)


@triton.jit
def _bounds(starts, ends, place, keys):
    """Return the bounds of some rows, and of the tile of them; rows that see nothing do not widen it."""
    start = tl.load(starts + place)
    end = tl.load(ends + place)
    sees = start < end
    begin = tl.min(tl.where(sees, start, keys), axis=0)
    finish = tl.max(tl.where(sees, end, 0), axis=0)
    return start, end, begin, finish


@triton.jit(do_not_specialize=["chosen"])
def row_sums(
    query,
    key,
    starts,
    ends,
    mask,
    mask_matters,
    allowed,
    peaks,
    inverses,
    queries,
    keys,
    heads,
    dim,
    scale,
    q_row,
    q_batch,
    q_head,
    k_row,
    k_batch,
    k_head,
    bound_batch,
    mask_batch,
    mask_row,
    allowed_batch,
    allowed_row,
    chosen,
    MASKED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FULL: tl.constexpr,
    UNROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the largest score of each row and the inverse of its sum of exponentials: (batch, heads, queries).

    0 and 0 where nothing is valid.
    """
    # Heads are side by side. The last rows come first: under a causal mask they have the most to do.
    head = (tl.program_id(0) % heads).to(tl.int64)
    row_tile = tl.num_programs(0) // heads - 1 - tl.program_id(0) // heads
    batch = tl.program_id(1).to(tl.int64)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    # Rows past the end read the last one again and are not stored: that costs less than a mask in the loop.
    inside = tl.minimum(rows, queries - 1).to(tl.int64)
    start, end, begin, finish = _bounds(starts, ends, batch * bound_batch + inside, keys)
    q_tile = query + batch * q_batch + head * q_head + inside[:, None] * q_row
    k_head_start = key + batch * k_batch + head * k_head
    if MASKED:
        matters = tl.load(mask_matters)
    peak = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for first in range(begin // COLUMNS * COLUMNS, finish, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        column = tl.minimum(columns, keys - 1).to(tl.int64)
        k_tile = k_head_start + column[None, :] * k_row
        score = _products(q_tile, k_tile, dim, CHUNK, CHUNKS, FULL, UNROLLED, ROWS, COLUMNS) * scale
        valid = (columns[None, :] >= start[:, None]) & (columns[None, :] < end[:, None])
        if MASKED:  # noqa: SIM102 - the one is settled when it is compiled
            if matters != 0:
                bias = tl.load(mask + batch * mask_batch + inside[:, None] * mask_row + column[None, :])
                valid = valid & (tl.abs(bias) < float("inf"))
                score += bias
        if chosen != 0:
            valid = valid & tl.load(allowed + batch * allowed_batch + inside[:, None] * allowed_row + column[None, :])
        score = tl.where(valid, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, axis=1))
        subtracted = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * _exp(peak - subtracted) + tl.sum(_exp(score - subtracted[:, None]), axis=1)
        peak = higher
    nothing = peak == float("-inf")
    place = (batch * heads + head) * queries + inside
    tl.store(peaks + place, tl.where(nothing, 0.0, peak), mask=rows < queries)
    inverse = 1.0 / tl.where(nothing, 1.0, total)
    tl.store(inverses + place, tl.where(nothing, 0.0, inverse), mask=rows < queries)


@triton.jit(do_not_specialize=["chosen"])
def sum_tiles(
    query,
    key,
    starts,
    ends,
    mask,
    mask_matters,
    allowed,
    peaks,
    inverses,
    out,
    queries,
    keys,
    heads,
    dim,
    scale,
    q_row,
    q_batch,
    q_head,
    k_row,
    k_batch,
    k_head,
    bound_batch,
    mask_batch,
    mask_row,
    allowed_batch,
    allowed_row,
    chosen,
    MASKED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FULL: tl.constexpr,
    UNROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the probabilities of a tile, added up over heads in registers: (batch, queries, keys), float32."""
    column_tiles = tl.cdiv(keys, COLUMNS)
    row_tile = tl.program_id(0) // column_tiles
    batch = tl.program_id(1).to(tl.int64)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    inside = tl.minimum(rows, queries - 1).to(tl.int64)
    columns = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    column = tl.minimum(columns, keys - 1).to(tl.int64)
    start, end, begin, finish = _bounds(starts, ends, batch * bound_batch + inside, keys)
    first = (tl.program_id(0) % column_tiles) * COLUMNS
    live = (first < finish) & (first + COLUMNS > begin)
    q_tile = query + batch * q_batch + inside[:, None] * q_row
    k_tile = key + batch * k_batch + column[None, :] * k_row
    row = batch * heads * queries + inside
    valid = (columns[None, :] >= start[:, None]) & (columns[None, :] < end[:, None])
    if MASKED:
        matters = tl.load(mask_matters)
        mask_tile = mask + batch * mask_batch + inside[:, None] * mask_row + column[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(tl.where(live, heads, 0)):
        score = _products(q_tile, k_tile, dim, CHUNK, CHUNKS, FULL, UNROLLED, ROWS, COLUMNS) * scale
        if MASKED:  # noqa: SIM102 - again for each head: kept, the tile would take registers
            if matters != 0:
                score += tl.load(mask_tile)
        total += _exp(score - tl.load(peaks + row)[:, None]) * tl.load(inverses + row)[:, None]
        q_tile += q_head
        k_tile += k_head
        row += queries
    if MASKED:  # noqa: SIM102
        if matters != 0:
            valid = valid & (tl.abs(tl.load(mask_tile)) < float("inf"))
    if chosen != 0:  # only now: it takes registers
        valid = valid & tl.load(allowed + batch * allowed_batch + inside[:, None] * allowed_row + column[None, :])
    place = out + (batch * queries + inside[:, None]) * keys + column[None, :]
    tl.store(place, tl.where(valid, total, 0.0), mask=(rows < queries)[:, None] & (columns < keys)[None, :])
