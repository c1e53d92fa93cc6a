"""The device code of attention over chosen keys: see `in_triton`, which launches it.

`q` is (queries, batch, heads, dim), `k` (keys, batch, dim), `indices` and `bias` (batch, queries, slots), the gradient of
the output and the output (queries, batch, heads, value). A row is a query of a batch element, query * batch + element;
`counts` has the number of slots of each row up to its last choice. Outputs are contiguous. `x_row`, `x_batch` and `x_head`
are strides in elements; every index that meets a stride has 64 bits.

Keys are in the dtype of queries (SCALES is 0), or FP8 numbers with so many float32 scales a key: `key_scales` is (keys, batch,
blocks), a scale for each block of 128 channels, or one for all.

Channels are cut in two parts, powers of two, because tensor cores take no other: FIRST, which is never cut short, and
REST, which may be (0 for none). Values lie in FIRST, or in both (WIDE).
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether functions run in Triton's interpreter, on CPU tensors."""

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
_LN_2 = tl.constexpr(0.6931471805599453)
HEAVY = tl.constexpr(0.75)
"""Of the weights of a row one at most is larger. The gradient of its score is computed from the others' gradients."""


@triton.jit
def _dot(left, right, sum):
    # The interpreter multiplies the bit patterns of bfloat16; as float32 the products are as exact.
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sum, input_precision="ieee")
    return tl.dot(left, right, sum)


@triton.jit
def _product(left, right):
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right)


@triton.jit
def _add_both(one, rounded_one, other, rounded_other):
    return one + other, rounded_one + rounded_other


@triton.jit
def _remainder(exact, rounded):
    """Return the rounding error of float32 numbers, in steps from one float32 number to the next."""
    steps = exact.to(tl.int32, bitcast=True) - rounded.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(steps, -32768), 32767).to(tl.int16)


@triton.jit
def _unrounded(rounded, remainder):
    """Return the float32 numbers that were rounded."""
    bits = rounded.to(tl.float32).to(tl.int32, bitcast=True) + remainder.to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def count_slots(indices, counts, batch, keys, slots, i_batch, i_row, SLOTS: tl.constexpr):
    """Write for each row how many of its slots there are up to the last choice."""
    row = tl.program_id(0)
    at = indices + (row % batch).to(tl.int64) * i_batch + (row // batch).to(tl.int64) * i_row
    last = tl.zeros((SLOTS,), dtype=tl.int32)
    for start in range(0, slots, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        index = tl.load(at + slot, mask=slot < slots, other=-1)
        last = tl.maximum(last, tl.where((index >= 0) & (index < keys), slot + 1, 0))
    tl.store(counts + row, tl.max(last, axis=0))


@triton.jit
def _keys(
    at,
    inside,
    like,
    key_scales,
    taken,
    chosen,
    channel,
    s_row,
    s_block,
    START: tl.constexpr,
    CHANNELS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Return a tile of keys (slots, channels) in the dtype of a pointer `like`, scaled; channels begin with START."""
    tile = tl.load(at, mask=inside, other=0.0)
    if SCALES > 0:
        FIRST_BLOCK: tl.constexpr = START // 128 if SCALES > 1 else 0
        scale_at = key_scales + taken * s_row
        scale = tl.load(scale_at + FIRST_BLOCK * s_block, mask=chosen, other=0.0)[:, None]
        for block in tl.static_range(FIRST_BLOCK + 1, (START + CHANNELS + 127) // 128):
            if block < SCALES:
                next = tl.load(scale_at + block * s_block, mask=chosen, other=0.0)[:, None]
                scale = tl.where((channel >= block * 128)[None, :], next, scale)
        tile = (tile.to(tl.float32) * scale).to(like.dtype.element_ty)
    return tile


@triton.jit
def _parts(at, inside, channels, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Return FIRST channels of rows as a tuple of tiles of WIDTH; 0 from `channels` on."""
    parts = ()
    for part in tl.static_range(FIRST // WIDTH):
        channel = part * WIDTH + tl.arange(0, WIDTH)
        parts = parts + (tl.load(at + channel[None, :], mask=inside & (channel < channels)[None, :], other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return parts


@triton.jit
def _key_parts(
    at, like, key_scales, taken, chosen, s_row, s_block, FIRST: tl.constexpr, WIDTH: tl.constexpr, SCALES: tl.constexpr
):
    """Return FIRST channels of keys, which none is cut short of, as a tuple of tiles of WIDTH: see `_keys`."""
    parts = ()
    for part in tl.static_range(FIRST // WIDTH):
        channel = part * WIDTH + tl.arange(0, WIDTH)
        tile = _keys(
            at + channel[None, :],
            chosen[:, None],
            like,
            key_scales,
            taken,
            chosen,
            channel,
            s_row,
            s_block,
            part * WIDTH,
            WIDTH,
            SCALES,
        )
        parts = parts + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    return parts


@triton.jit
def _no_sums(ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    sums = ()
    for _ in tl.static_range(PARTS):
        sums = sums + (tl.zeros((ROWS, WIDTH), dtype=tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return sums


@triton.jit
def _added(left, right, sums, shrunk, PARTS: tl.constexpr, SHRINKS: tl.constexpr):
    """Return the sums, shrunk, with the products of one tile and each tile on the right added."""
    added = ()
    for part in tl.static_range(PARTS):
        sum = sums[part] * shrunk if SHRINKS else sums[part]
        added = added + (_dot(left, right[part], sum),)  # type: ignore[assignment]  # noqa: RUF005
    return added


@triton.jit
def _products(left, right, PARTS: tl.constexpr):
    """Return products of rows with rows, whose channels come in tiles."""
    sum = _product(left[0], tl.trans(right[0]))
    for part in tl.static_range(1, PARTS):
        sum = _dot(left[part], tl.trans(right[part]), sum)
    return sum


@triton.jit
def _scores(
    q_parts,
    q_rest,
    k_parts,
    k_rest,
    chosen,
    bias,
    slot,
    slots,
    factor,
    PARTS: tl.constexpr,
    REST: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Return the scores of a tile (heads, slots) as powers of two, -inf where there is no choice."""
    score = _products(q_parts, k_parts, PARTS)
    if REST > 0:
        score = _dot(q_rest, tl.trans(k_rest), score)
    score = score * factor
    if BIAS:
        score += tl.load(bias + slot, mask=slot < slots, other=0.0).to(tl.float32)[None, :] * _LOG2_E
    return tl.where(chosen[None, :], score, float("-inf"))


@triton.jit
def attend_rows(
    q,
    k,
    indices,
    counts,
    key_scales,
    bias,
    sink,
    out,
    remainder,
    lse,
    batch,
    heads,
    keys,
    slots,
    dim,
    value,
    factor,
    q_row,
    q_batch,
    q_head,
    k_row,
    k_batch,
    i_batch,
    i_row,
    s_row,
    s_batch,
    s_block,
    b_batch,
    b_row,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    SCALES: tl.constexpr,
    BIAS: tl.constexpr,
    SINK: tl.constexpr,
    KEEPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the output and the log-sum-exp of some heads of a row; `factor` is the scale times log2(e).

    KEEPS: the output is divided by the sum of the weights as they are multiplied, rounded, so that its shares add up to 1, and
    its rounding error is written, too. A backward pass needs both.
    """
    PARTS: tl.constexpr = FIRST // WIDTH
    blocks = tl.cdiv(heads, HEADS)
    row = tl.program_id(0) // blocks
    head = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    query, element = (row // batch).to(tl.int64), (row % batch).to(tl.int64)
    q_at = q + query * q_row + element * q_batch + head.to(tl.int64)[:, None] * q_head
    k += element * k_batch
    indices += element * i_batch + query * i_row
    if SCALES > 0:
        key_scales += element * s_batch
    if BIAS:
        bias += element * b_batch + query * b_row
    q_parts = _parts(q_at, head[:, None] < heads, dim, FIRST, WIDTH)
    sums = _no_sums(HEADS, WIDTH, PARTS)
    if REST > 0:
        rest = FIRST + tl.arange(0, REST)
        q_rest = tl.load(q_at + rest[None, :], mask=(head[:, None] < heads) & (rest[None, :] < dim), other=0.0)
    else:
        q_rest = q_parts[0]
    if WIDE:
        sum_rest = tl.zeros((HEADS, REST), dtype=tl.float32)
    if SINK:
        largest = tl.load(sink + head, mask=head < heads, other=0.0).to(tl.float32) * _LOG2_E
        total = tl.full((HEADS,), 1.0, dtype=tl.float32)
    else:
        largest = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((HEADS,), dtype=tl.float32)
    rounded_total = total
    for start in tl.range(0, tl.load(counts + row), SLOTS, num_stages=STAGES):
        slot = start + tl.arange(0, SLOTS)
        index = tl.load(indices + slot, mask=slot < slots, other=-1)
        chosen = (index >= 0) & (index < keys)
        taken = tl.where(chosen, index, 0).to(tl.int64)
        k_at = k + taken[:, None] * k_row
        k_parts = _key_parts(k_at, q, key_scales, taken, chosen, s_row, s_block, FIRST, WIDTH, SCALES)
        if REST > 0:
            inside_rest = chosen[:, None] & (rest[None, :] < dim)
            k_rest = _keys(
                k_at + rest[None, :],
                inside_rest,
                q,
                key_scales,
                taken,
                chosen,
                rest,
                s_row,
                s_block,
                FIRST,
                REST,
                SCALES,
            )
        else:
            k_rest = k_parts[0]
        score = _scores(q_parts, q_rest, k_parts, k_rest, chosen, bias, slot, slots, factor, PARTS, REST, BIAS)
        above = tl.maximum(largest, tl.max(score, axis=1))
        base = tl.where(above == float("-inf"), 0.0, above)
        weight = tl.exp2(score - base[:, None])
        shrunk = tl.exp2(largest - base)
        largest = above
        if KEEPS:  # in one reduction: each waits for other warps
            rounded = weight.to(q_rest.dtype).to(tl.float32)
            added, rounded_added = tl.reduce((weight, rounded), axis=1, combine_fn=_add_both)
            rounded_total = rounded_total * shrunk + rounded_added
        else:
            added = tl.sum(weight, axis=1)
        total = total * shrunk + added
        weight = weight.to(q_rest.dtype)
        sums = _added(weight, k_parts, sums, shrunk[:, None], PARTS, True)
        if WIDE:
            sum_rest = _dot(weight, k_rest, sum_rest * shrunk[:, None])
    divisor = rounded_total if KEEPS else total
    share = (1.0 / tl.where(divisor == 0.0, 1.0, divisor))[:, None]
    place = (query * batch + element) * heads + head
    inside = head[:, None] < heads
    out_at = place[:, None] * value
    for part in tl.static_range(PARTS):
        exact = sums[part] * share
        channel = part * WIDTH + tl.arange(0, WIDTH)
        of_part = inside & (channel[None, :] < value)
        rounded = exact.to(out.dtype.element_ty)
        tl.store(out + out_at + channel[None, :], rounded, mask=of_part)
        if KEEPS:
            tl.store(remainder + out_at + channel[None, :], _remainder(exact, rounded), mask=of_part)
    if WIDE:
        sum_rest *= share
        of_rest = inside & (rest[None, :] < value)
        rounded_rest = sum_rest.to(out.dtype.element_ty)
        tl.store(out + out_at + rest[None, :], rounded_rest, mask=of_rest)
        if KEEPS:
            tl.store(remainder + out_at + rest[None, :], _remainder(sum_rest, rounded_rest), mask=of_rest)
    tl.store(lse + place, (largest + tl.log2(total)) * _LN_2, mask=head < heads)


@triton.jit
def mean_gradients(
    out,
    remainder,
    grad,
    of_lse,
    mean,
    heads,
    value,
    batch,
    g_row,
    g_batch,
    g_head,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Write the sum over channels of output times its gradient, less the gradient of the log-sum-exp.

    KEPT: of the output before it was rounded.
    """
    blocks = tl.cdiv(heads, HEADS)
    row = tl.program_id(0) // blocks
    head = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    query, element = (row // batch).to(tl.int64), (row % batch).to(tl.int64)
    place = (query * batch + element) * heads + head
    inside = head < heads
    sum = tl.zeros((HEADS,), dtype=tl.float32)
    grad_at = grad + query * g_row + element * g_batch + head.to(tl.int64)[:, None] * g_head
    for start in range(0, value, VALUE):
        channel = (start + tl.arange(0, VALUE))[None, :]
        both = inside[:, None] & (channel < value)
        at = place[:, None] * value + channel
        left = tl.load(out + at, mask=both, other=0.0)
        if KEPT:
            left = _unrounded(left, tl.load(remainder + at, mask=both, other=0))
        left = left.to(tl.float32)
        sum += tl.sum(left * tl.load(grad_at + channel, mask=both, other=0.0).to(tl.float32), axis=1)
    tl.store(mean + place, sum - tl.load(of_lse + place, mask=inside, other=0.0), mask=inside)


@triton.jit
def query_side(
    q,
    k,
    indices,
    counts,
    key_scales,
    bias,
    grad,
    lse,
    mean,
    due,
    of_q,
    weights,
    of_scores,
    row_start,
    batch,
    heads,
    keys,
    slots,
    dim,
    value,
    scale,
    q_row,
    q_batch,
    q_head,
    k_row,
    k_batch,
    i_batch,
    i_row,
    s_row,
    s_batch,
    s_block,
    b_batch,
    b_row,
    g_row,
    g_batch,
    g_head,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    SCALES: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradient of some heads' query in a row; weights and gradients of scores as (rows, heads, slots).

    Gradients of the scores of a row add up to `due`. That of a heavy slot, one with more than HEAVY of all weight, is a small
    difference of large numbers. It is computed as `due` less the gradients of the others, so it is as exact as they are.
    """
    PARTS: tl.constexpr = FIRST // WIDTH
    blocks = tl.cdiv(heads, HEADS)
    local = tl.program_id(0) // blocks
    row = row_start + local
    head = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    query, element = (row // batch).to(tl.int64), (row % batch).to(tl.int64)
    inside = head < heads
    head_at = head.to(tl.int64)[:, None]
    q_at = q + query * q_row + element * q_batch + head_at * q_head
    grad_at = grad + query * g_row + element * g_batch + head_at * g_head
    k += element * k_batch
    indices += element * i_batch + query * i_row
    if SCALES > 0:
        key_scales += element * s_batch
    if BIAS:
        bias += element * b_batch + query * b_row
    q_parts = _parts(q_at, inside[:, None], dim, FIRST, WIDTH)
    grad_parts = _parts(grad_at, inside[:, None], value, FIRST, WIDTH)
    sums = _no_sums(HEADS, WIDTH, PARTS)
    if REST > 0:
        rest = FIRST + tl.arange(0, REST)
        q_rest = tl.load(q_at + rest[None, :], mask=inside[:, None] & (rest[None, :] < dim), other=0.0)
        sum_rest = tl.zeros((HEADS, REST), dtype=tl.float32)
    else:
        q_rest = q_parts[0]
    if WIDE:
        grad_rest = tl.load(grad_at + rest[None, :], mask=inside[:, None] & (rest[None, :] < value), other=0.0)
    place = (query * batch + element) * heads + head
    base = tl.load(lse + place, mask=inside, other=0.0) * _LOG2_E
    base = tl.where(base == float("-inf"), 0.0, base)[:, None]
    middle = tl.load(mean + place, mask=inside, other=0.0)[:, None]
    others = tl.zeros((HEADS,), dtype=tl.float32)
    heavy = tl.full((HEADS,), -1, dtype=tl.int32)
    factor = scale * _LOG2_E
    for start in tl.range(0, tl.load(counts + row), SLOTS, num_stages=STAGES):
        slot = start + tl.arange(0, SLOTS)
        index = tl.load(indices + slot, mask=slot < slots, other=-1)
        chosen = (index >= 0) & (index < keys)
        taken = tl.where(chosen, index, 0).to(tl.int64)
        k_at = k + taken[:, None] * k_row
        k_parts = _key_parts(k_at, q, key_scales, taken, chosen, s_row, s_block, FIRST, WIDTH, SCALES)
        if REST > 0:
            inside_rest = chosen[:, None] & (rest[None, :] < dim)
            k_rest = _keys(
                k_at + rest[None, :],
                inside_rest,
                q,
                key_scales,
                taken,
                chosen,
                rest,
                s_row,
                s_block,
                FIRST,
                REST,
                SCALES,
            )
        else:
            k_rest = k_parts[0]
        score = _scores(q_parts, q_rest, k_parts, k_rest, chosen, bias, slot, slots, factor, PARTS, REST, BIAS)
        weight = tl.exp2(score - base)
        of_weight = _products(grad_parts, k_parts, PARTS)
        if WIDE:
            of_weight = _dot(grad_rest, tl.trans(k_rest), of_weight)
        is_heavy = weight > HEAVY
        heavy = tl.maximum(heavy, tl.max(tl.where(is_heavy, slot[None, :], -1), axis=1))
        of_score = tl.where(is_heavy, 0.0, weight * (of_weight - middle))
        others += tl.sum(of_score, axis=1)
        of_score = of_score.to(q_rest.dtype)
        kept_at = (local.to(tl.int64) * heads + head)[:, None] * slots + slot[None, :]
        kept = inside[:, None] & (slot < slots)[None, :]
        tl.store(weights + kept_at, weight.to(q_rest.dtype), mask=kept)
        tl.store(of_scores + kept_at, of_score, mask=kept)
        sums = _added(of_score, k_parts, sums, 1.0, PARTS, False)
        if REST > 0:
            sum_rest = _dot(of_score, k_rest, sum_rest)
    if tl.max(heavy, axis=0) >= 0:
        has_heavy = inside & (heavy >= 0)
        tl.debug_barrier()  # the loop has written 0 there, in another thread perhaps
        of_heavy = (tl.load(due + place, mask=inside, other=0.0) - others).to(q_rest.dtype)
        tl.store(of_scores + (local.to(tl.int64) * heads + head) * slots + heavy, of_heavy, mask=has_heavy)
        # One more tile, whose slots are the heavy ones of the heads: a head takes part in its own.
        local_head = tl.arange(0, HEADS)
        own = has_heavy[:, None] & (local_head[:, None] == local_head[None, :])
        of_heavy = tl.where(own, of_heavy[:, None], 0.0).to(q_rest.dtype)
        taken = tl.load(indices + heavy, mask=has_heavy, other=0).to(tl.int64)
        k_at = k + taken[:, None] * k_row
        k_parts = _key_parts(k_at, q, key_scales, taken, has_heavy, s_row, s_block, FIRST, WIDTH, SCALES)
        sums = _added(of_heavy, k_parts, sums, 1.0, PARTS, False)
        if REST > 0:
            k_heavy = _keys(
                k_at + rest[None, :],
                has_heavy[:, None] & (rest[None, :] < dim),
                q,
                key_scales,
                taken,
                has_heavy,
                rest,
                s_row,
                s_block,
                FIRST,
                REST,
                SCALES,
            )
            sum_rest = _dot(of_heavy, k_heavy, sum_rest)
    of_q_at = of_q + place[:, None] * dim
    for part in tl.static_range(PARTS):
        channel = (part * WIDTH + tl.arange(0, WIDTH))[None, :]
        tl.store(of_q_at + channel, (sums[part] * scale).to(of_q.dtype.element_ty), mask=inside[:, None])
    if REST > 0:
        tl.store(
            of_q_at + rest[None, :],
            (sum_rest * scale).to(of_q.dtype.element_ty),
            mask=inside[:, None] & (rest[None, :] < dim),
        )


@triton.jit
def add_keys(
    k,
    indices,
    counts,
    of_scores,
    of_q,
    row_start,
    batch,
    heads,
    keys,
    slots,
    dim,
    scale,
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
    """Write the gradient of some heads' query in a row: keys times kept gradients of scores, (rows, heads, slots)."""
    blocks = tl.cdiv(heads, HEADS)
    local = tl.program_id(0) // blocks
    row = row_start + local
    head = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    query, element = (row // batch).to(tl.int64), (row % batch).to(tl.int64)
    inside = (head < heads)[:, None]
    first = tl.arange(0, FIRST)
    k += element * k_batch
    indices += element * i_batch + query * i_row
    kept_at = of_scores + (local.to(tl.int64) * heads + head)[:, None] * slots
    sum_first = tl.zeros((HEADS, FIRST), dtype=tl.float32)
    if REST > 0:
        rest = FIRST + tl.arange(0, REST)
        sum_rest = tl.zeros((HEADS, REST), dtype=tl.float32)
    for start in tl.range(0, tl.load(counts + row), SLOTS, num_stages=STAGES):
        slot = start + tl.arange(0, SLOTS)
        index = tl.load(indices + slot, mask=slot < slots, other=-1)
        chosen = (index >= 0) & (index < keys)
        k_at = k + tl.where(chosen, index, 0).to(tl.int64)[:, None] * k_row
        of_score = tl.load(kept_at + slot[None, :], mask=inside & (slot < slots)[None, :], other=0.0)
        k_first = tl.load(k_at + first[None, :], mask=chosen[:, None], other=0.0)
        sum_first = _dot(of_score, k_first, sum_first)
        if REST > 0:
            k_rest = tl.load(k_at + rest[None, :], mask=chosen[:, None] & (rest[None, :] < dim), other=0.0)
            sum_rest = _dot(of_score, k_rest, sum_rest)
    of_q_at = of_q + ((query * batch + element) * heads + head)[:, None] * dim
    tl.store(of_q_at + first[None, :], (sum_first * scale).to(of_q.dtype.element_ty), mask=inside)
    if REST > 0:
        within = inside & (rest[None, :] < dim)
        tl.store(of_q_at + rest[None, :], (sum_rest * scale).to(of_q.dtype.element_ty), mask=within)


@triton.jit
def _exponent(peak):
    """Return the biased exponent of the power of two that brings a peak just below 2**14; of 1 if it is not finite."""
    biased = (peak.to(tl.int32, bitcast=True) >> 23) & 255
    return tl.where(biased == 255, 127, tl.minimum(267 - biased, 253))


@triton.jit
def _power(exponent):
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def slot_side(
    q,
    grad,
    weights,
    of_scores,
    counts,
    of_slots,
    units,
    row_start,
    kept_start,
    batch,
    heads,
    slots,
    dim,
    value,
    scale,
    channel_start,
    unit_start,
    unit_tiles,
    tiles,
    q_row,
    q_batch,
    q_head,
    g_row,
    g_batch,
    g_head,
    SLOTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the contributions of some slots of a row to the gradient of their keys, in some channels, as float16 times a unit each.

    `of_slots` is (rows, slots, dim) and `units` (rows, slots, tiles of channels). `weights` and `of_scores` begin with row
    `kept_start`. Programs side by side read the same row. BLOCKS: tensors come as descriptors of matrices whose rows are
    (row, head) or (row, slot), the first four from `kept_start` on, and tiles of heads and slots are whole; slots behind the
    count get numbers that are never read.
    """
    across = tl.program_id(0) % tiles
    down = (tl.program_id(0) // tiles) % tl.cdiv(slots, SLOTS)
    local = tl.program_id(0) // tiles // tl.cdiv(slots, SLOTS)
    row = row_start + local
    count = tl.load(counts + row)
    if down * SLOTS < count:
        slot = down * SLOTS + tl.arange(0, SLOTS)
        first = channel_start + across * CHANNELS
        sum = tl.zeros((SLOTS, CHANNELS), dtype=tl.float32)
        if BLOCKS:
            for start in tl.range(0, heads, HEADS, num_stages=STAGES):
                left = of_scores.load([(row - kept_start) * heads + start, down * SLOTS])
                sum = _dot(tl.trans(left), q.load([(row - kept_start) * heads + start, first]), sum)
            sum *= scale
            if VALUES:
                for start in tl.range(0, heads, HEADS, num_stages=STAGES):
                    left = weights.load([(row - kept_start) * heads + start, down * SLOTS])
                    sum = _dot(tl.trans(left), grad.load([(row - kept_start) * heads + start, first]), sum)
        else:
            query, element = (row // batch).to(tl.int64), (row % batch).to(tl.int64)
            channel = first + tl.arange(0, CHANNELS)
            kept_at = (row - kept_start).to(tl.int64) * heads * slots + slot[None, :]
            q_at = q + query * q_row + element * q_batch + channel[None, :]
            grad_at = grad + query * g_row + element * g_batch + channel[None, :]
            there = (slot < count)[None, :]
            for start in tl.range(0, heads, HEADS, num_stages=STAGES):
                head = start + tl.arange(0, HEADS)[:, None]
                left = tl.load(of_scores + kept_at + head * slots, mask=(head < heads) & there, other=0.0)
                inside = (head < heads) & (channel < dim)[None, :]
                sum = _dot(tl.trans(left), tl.load(q_at + head.to(tl.int64) * q_head, mask=inside, other=0.0), sum)
            sum *= scale
            if VALUES:
                for start in tl.range(0, heads, HEADS, num_stages=STAGES):
                    head = start + tl.arange(0, HEADS)[:, None]
                    left = tl.load(weights + kept_at + head * slots, mask=(head < heads) & there, other=0.0)
                    inside = (head < heads) & (channel < value)[None, :]
                    sum = _dot(
                        tl.trans(left), tl.load(grad_at + head.to(tl.int64) * g_head, mask=inside, other=0.0), sum
                    )
        exponent = _exponent(tl.max(tl.abs(sum), axis=1))
        part = (sum * _power(exponent)[:, None]).to(tl.float16)
        place = local.to(tl.int64) * slots + slot
        tl.store(units + place * unit_tiles + unit_start + across, _power(254 - exponent), mask=slot < count)
        if BLOCKS:
            of_slots.store([local * slots + down * SLOTS, first], part)
        else:
            channel = first + tl.arange(0, CHANNELS)
            inside = (slot < count)[:, None] & (channel < dim)[None, :]
            tl.store(of_slots + place[:, None] * dim + channel[None, :], part, mask=inside)


@triton.jit
def _store_slots(of_slots, units, sum, place, inside, channel, dim):
    """Store float32 numbers of a tile of channels of slots as float16 times a unit of each slot."""
    exponent = _exponent(tl.max(tl.abs(sum), axis=1))
    part = (sum * _power(exponent)[:, None]).to(tl.float16)
    at = of_slots + place[:, None] * dim + channel
    tl.store(at, part, mask=inside[:, None] & (channel < dim), eviction_policy="evict_first")
    tl.store(units, _power(254 - exponent), mask=inside)


@triton.jit
def slot_side_of_few_heads(
    q,
    grad,
    weights,
    of_scores,
    counts,
    of_slots,
    units,
    row_start,
    kept_start,
    batch,
    heads,
    slots,
    dim,
    value,
    scale,
    q_row,
    q_batch,
    q_head,
    g_row,
    g_batch,
    g_head,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the results of `slot_side` where one tile has all heads: a program reads its slots once for all channels.

    These are TILES tiles of WIDTH channels and one of REST (0 for none).
    """
    down = tl.program_id(0) % tl.cdiv(slots, SLOTS)
    local = tl.program_id(0) // tl.cdiv(slots, SLOTS)
    row = row_start + local
    count = tl.load(counts + row)
    if down * SLOTS < count:
        slot = down * SLOTS + tl.arange(0, SLOTS)
        there = slot < count
        query, element = (row // batch).to(tl.int64), (row % batch).to(tl.int64)
        head = tl.arange(0, HEADS)[:, None]
        kept_at = (row - kept_start).to(tl.int64) * heads * slots + slot[None, :] + head * slots
        kept = (head < heads) & there[None, :]
        of_score = tl.trans(tl.load(of_scores + kept_at, mask=kept, other=0.0))
        weight = tl.trans(tl.load(weights + kept_at, mask=kept, other=0.0))
        q_at = q + query * q_row + element * q_batch + head.to(tl.int64) * q_head
        grad_at = grad + query * g_row + element * g_batch + head.to(tl.int64) * g_head
        place = local.to(tl.int64) * slots + slot
        units_at = units + place * (TILES + (1 if REST > 0 else 0))
        for tile in tl.range(0, TILES, num_stages=STAGES):
            channel = (tile * WIDTH + tl.arange(0, WIDTH))[None, :]
            sum = _product(of_score, tl.load(q_at + channel, mask=(head < heads) & (channel < dim), other=0.0)) * scale
            above = tl.load(grad_at + channel, mask=(head < heads) & (channel < value), other=0.0)
            _store_slots(of_slots, units_at + tile, _dot(weight, above, sum), place, there, channel, dim)
        if REST > 0:
            channel = (TILES * WIDTH + tl.arange(0, REST))[None, :]
            sum = _product(of_score, tl.load(q_at + channel, mask=(head < heads) & (channel < dim), other=0.0)) * scale
            above = tl.load(grad_at + channel, mask=(head < heads) & (channel < value), other=0.0)
            _store_slots(of_slots, units_at + TILES, _dot(weight, above, sum), place, there, channel, dim)


@triton.jit
def place_slots(indices, places, row_start, batch, keys, slots, offset, i_batch, i_row, SLOTS: tl.constexpr):
    """Write for each slot of a row which row of the keys, key * batch + element, it holds, and keys * batch for none, less `offset`."""
    local = tl.program_id(0)
    row = row_start + local
    element = row % batch
    at = indices + element.to(tl.int64) * i_batch + (row // batch).to(tl.int64) * i_row
    for start in range(0, slots, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        index = tl.load(at + slot, mask=slot < slots, other=-1)
        chosen = (index >= 0) & (index < keys)
        place = tl.where(chosen, index.to(tl.int32) * batch + element, keys * batch) - offset
        tl.store(places + local.to(tl.int64) * slots + slot, place.to(places.dtype.element_ty), mask=slot < slots)


@triton.jit
def sum_slots(
    of_slots,
    units,
    order,
    ends,
    of_k,
    dim,
    channel_start,
    unit_start,
    unit_tiles,
    FIRST_TIME: tl.constexpr,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add up the contributions of all slots of a key to its gradient, in slot order; the slots of each key end at `ends`.

    Of TILES tiles of WIDTH channels, a power of two, and of one more of REST channels (0 for none).
    """
    key = tl.program_id(0)
    tile = tl.arange(0, TILES)
    channel = channel_start + tile[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    within = channel < dim
    begin, end = tl.load(ends + key), tl.load(ends + key + 1)
    units += unit_start
    sum = tl.zeros((SLOTS, TILES, WIDTH), dtype=tl.float32)
    if REST > 0:
        rest = channel_start + TILES * WIDTH + tl.arange(0, REST)
        sum_rest = tl.zeros((SLOTS, REST), dtype=tl.float32)
    for start in tl.range(begin, end, SLOTS, num_stages=STAGES):
        place = start + tl.arange(0, SLOTS)
        there = place < end
        slot = tl.load(order + place, mask=there, other=0).to(tl.int64)
        unit = tl.load(units + slot[:, None] * unit_tiles + tile[None, :], mask=there[:, None], other=0.0)
        at = of_slots + slot * dim
        part = tl.load(
            at[:, None, None] + channel[None, :, :],
            mask=there[:, None, None] & within[None, :, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        sum += part.to(tl.float32) * unit[:, :, None]
        if REST > 0:
            unit = tl.load(units + slot * unit_tiles + TILES, mask=there, other=0.0)
            inside = there[:, None] & (rest < dim)[None, :]
            part = tl.load(at[:, None] + rest[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
            sum_rest += part.to(tl.float32) * unit[:, None]
    at = of_k + key.to(tl.int64) * dim
    result = tl.sum(sum, axis=0)
    if not FIRST_TIME:
        result += tl.load(at + channel, mask=within, other=0.0)
    tl.store(at + channel, result, mask=within)
    if REST > 0:
        result = tl.sum(sum_rest, axis=0)
        if not FIRST_TIME:
            result += tl.load(at + rest, mask=rest < dim, other=0.0)
        tl.store(at + rest, result, mask=rest < dim)
