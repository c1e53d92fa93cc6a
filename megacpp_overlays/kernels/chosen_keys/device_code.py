"""The device code of the indexer over chosen keys: see `in_triton`, which launches it.

`query` and `q` are (queries, batch, heads, dim), `key` and `k` (keys, batch, dim), `indices` and `grad` (batch, queries, slots),
contiguous. A row is a query of a batch element, query * batch + element; `counts` has the number of slots of each row up to
its last key. The programs work on the rows from `row_start` on. `x_row`, `x_batch` and `x_head` are strides in elements, also
those of `indices`. Every index that is multiplied by a stride has 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether functions run in Triton's interpreter, on CPU tensors."""

LOG2_E = 1.4426950408889634


@triton.jit
def _product(left, right):
    # The interpreter multiplies the bit patterns of bfloat16; as float32 the products are as exact.
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right)


@triton.jit
def _added(left, right, sum):
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sum, input_precision="ieee")
    return tl.dot(left, right, sum)


@triton.jit
def score_pairs(
    query,
    key,
    indices,
    counts,
    out,
    row_start,
    batch,
    heads,
    slots,
    dim,
    factor,
    q_row,
    q_batch,
    q_head,
    k_row,
    k_batch,
    i_batch,
    i_row,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the scaled products of some heads' query with the chosen keys of a row, (rows, slots, heads), float32.

    Channels are cut in two parts, powers of two: FIRST, which is never cut short, and REST, which may be (0 for none).
    """
    blocks = tl.cdiv(heads, HEADS)
    local = tl.program_id(0) // blocks
    row = row_start + local
    head = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    at, element = (row // batch).to(tl.int64), (row % batch).to(tl.int64)
    first = tl.arange(0, FIRST)
    q_at = query + at * q_row + element * q_batch + head.to(tl.int64)[:, None] * q_head
    key += element * k_batch
    indices += element * i_batch + at * i_row
    inside = head[:, None] < heads
    q_first = tl.load(q_at + first[None, :], mask=inside, other=0.0)
    if REST > 0:
        rest = FIRST + tl.arange(0, REST)
        q_rest = tl.load(q_at + rest[None, :], mask=inside & (rest[None, :] < dim), other=0.0)
    count = tl.load(counts + row)
    out += local.to(tl.int64) * slots * heads
    for start in tl.range(0, count, SLOTS, num_stages=STAGES):
        slot = start + tl.arange(0, SLOTS)
        there = slot < count
        taken = tl.load(indices + slot, mask=there, other=0).to(tl.int64)
        k_at = key + taken[:, None] * k_row
        k_first = tl.load(k_at + first[None, :], mask=there[:, None], other=0.0)
        score = _product(k_first, tl.trans(q_first))
        if REST > 0:
            k_rest = tl.load(k_at + rest[None, :], mask=there[:, None] & (rest[None, :] < dim), other=0.0)
            score = _added(k_rest, tl.trans(q_rest), score)
        place = out + slot[:, None] * heads + head[None, :]
        tl.store(place, score * factor, mask=there[:, None] & (head < heads)[None, :])


@triton.jit
def sum_heads(
    scores,
    counts,
    out,
    row_start,
    batch,
    queries,
    heads,
    slots,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Write the softmax over slots of powers of two, summed over heads, (batch, queries, slots); 0 behind the count."""
    local = tl.program_id(0)
    row = row_start + local
    head = tl.arange(0, HEADS)[None, :]
    count = tl.load(counts + row)
    scores += local.to(tl.int64) * slots * heads + head
    peak = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((HEADS,), dtype=tl.float32)
    for start in range(0, count, SLOTS):
        slot = (start + tl.arange(0, SLOTS))[:, None]
        score = tl.load(scores + slot * heads, mask=(slot < count) & (head < heads), other=float("-inf"))
        above = tl.maximum(peak, tl.max(score, axis=0))
        base = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(score - base[None, :]), axis=0)
        peak = above
    base = tl.where(peak == float("-inf"), 0.0, peak)[None, :]
    share = tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))[None, :]
    out += ((row % batch).to(tl.int64) * queries + row // batch) * slots
    for start in range(0, slots, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        inside = (slot < count)[:, None] & (head < heads)
        score = tl.load(scores + slot[:, None] * heads, mask=inside, other=float("-inf"))
        tl.store(out + slot, tl.sum(tl.exp2(score - base) * share, axis=1), mask=slot < slots)


@triton.jit
def compare_rows(scores, sums, indices, divergences, slots, smallest, SLOTS: tl.constexpr):
    """Write the divergence of a row's softmax over scores from its target, and over the scores their difference.

    `scores`, `sums` and `indices` are (rows, slots), contiguous; a row fits into one tile. The difference is 0 where no key is.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    at = row * slots + slot
    valid = tl.load(indices + at, mask=slot < slots, other=-1) >= 0
    score = tl.load(scores + at, mask=valid, other=float("-inf"))
    target = tl.load(sums + at, mask=valid, other=0.0)
    peak = tl.max(tl.where(valid, score, -3.4028234663852886e38), axis=0)
    # A NaN is larger than nothing: it reaches the row through the differences.
    away = tl.where(valid, score - peak, 0.0)
    number = tl.where(valid, tl.exp(away), 0.0)
    total = tl.sum(number, axis=0)
    total = tl.where(total == 0.0, 1.0, total)
    target = target / tl.maximum(tl.sum(target, axis=0), smallest, propagate_nan=tl.PropagateNan.ALL)
    terms = target * (tl.log(tl.maximum(target, smallest)) - (away - tl.log(total)))
    tl.store(divergences + row, tl.sum(tl.where(valid, terms, 0.0), axis=0))
    tl.store(scores + at, tl.where(valid, number / total - target, 0.0), mask=slot < slots)


@triton.jit
def _exponent(peak):
    """Return the biased exponent of the power of two that brings a peak just below 2**14; of 1 if it is not finite."""
    biased = (peak.to(tl.int32, bitcast=True) >> 23) & 255
    return tl.where(biased == 255, 127, tl.minimum(267 - biased, 253))


@triton.jit
def _power(exponent):
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def pair_gradients(
    grad,
    indices,
    counts,
    q,
    weights,
    k,
    of_q,
    of_weights,
    of_slots,
    units,
    row_start,
    batch,
    heads,
    slots,
    dim,
    q_row,
    q_batch,
    q_head,
    w_row,
    w_batch,
    w_head,
    k_row,
    k_batch,
    i_batch,
    i_row,
    RELU: tl.constexpr,
    ROUNDED: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradients of q and of the weights of a row, and the contributions of its slots to the gradients of their keys.

    A gradient of a score becomes two bfloat16 numbers, which together have 16 bits, so that the common part of the keys cancels.
    A slot adds float16 numbers times a unit, a power of two of its own: (rows, slots, dim) and (rows, slots, 1). ROUNDED:
    weights are bfloat16 numbers, otherwise they become two of them.
    """
    local = tl.program_id(0)
    row = row_start + local
    at, element = (row // batch).to(tl.int64), (row % batch).to(tl.int64)
    head = tl.arange(0, HEADS)
    d = tl.arange(0, DIM)
    inside = (head < heads)[:, None] & (d < dim)[None, :]
    q_at = q + at * q_row + element * q_batch + head.to(tl.int64)[:, None] * q_head
    query = tl.load(q_at + d[None, :], mask=inside, other=0.0)
    w_at = weights + at * w_row + element * w_batch + head.to(tl.int64) * w_head
    weight = tl.load(w_at, mask=head < heads, other=0.0).to(tl.float32)
    w_high = weight.to(tl.bfloat16).to(tl.float32)
    k += element * k_batch
    indices += element * i_batch + at * i_row
    grad += element * i_batch + at * i_row
    count = tl.load(counts + row)
    sum_q = tl.zeros((HEADS, DIM), dtype=tl.float32)
    sum_weights = tl.zeros((HEADS,), dtype=tl.float32)
    for start in tl.range(0, count, SLOTS, num_stages=STAGES):
        slot = start + tl.arange(0, SLOTS)
        there = slot < count
        taken = tl.load(indices + slot, mask=there, other=0).to(tl.int64)
        key = tl.load(k + taken[:, None] * k_row + d[None, :], mask=there[:, None] & (d < dim)[None, :], other=0.0)
        above = tl.load(grad + slot, mask=there, other=0.0)
        product = _product(query, tl.trans(key))
        # The gate multiplies, as upstream's does, so that a NaN behind a closed one is not lost.
        if RELU:  # noqa: SIM108 - settled when it is compiled
            gate = tl.where(product > 0, 1.0, 0.0)
        else:
            gate = tl.full((HEADS, SLOTS), 1.0, dtype=tl.float32)
        sum_weights += tl.sum(gate * above[None, :] * product, axis=1)
        high = above.to(tl.bfloat16).to(tl.float32)
        sum_q = _added((gate * high[None, :]).to(tl.bfloat16), key, sum_q)
        sum_q = _added((gate * (above - high)[None, :]).to(tl.bfloat16), key, sum_q)
        of_key = _product(tl.trans((gate * w_high[:, None]).to(tl.bfloat16)), query)
        if not ROUNDED:
            of_key = _added(tl.trans((gate * (weight - w_high)[:, None]).to(tl.bfloat16)), query, of_key)
        of_key *= above[:, None]
        exponent = _exponent(tl.max(tl.abs(of_key), axis=1))
        place = local.to(tl.int64) * slots + slot
        tl.store(units + place, _power(254 - exponent), mask=there)
        part = (of_key * _power(exponent)[:, None]).to(tl.float16)
        tl.store(of_slots + place[:, None] * dim + d[None, :], part, mask=there[:, None] & (d < dim)[None, :])
    place = (at * batch + element) * heads + head
    result = (sum_q * weight[:, None]).to(of_q.dtype.element_ty)
    tl.store(of_q + place[:, None] * dim + d[None, :], result, mask=inside)
    tl.store(of_weights + place, sum_weights.to(of_weights.dtype.element_ty), mask=head < heads)
