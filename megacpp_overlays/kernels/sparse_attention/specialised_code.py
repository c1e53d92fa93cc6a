"""Device code for Hopper in Gluon: warps of a program share out the work of attention over chosen keys.

`in_triton` says when these run in place of the kernels in `device_code`, whose names for arguments hold here; heads come in
blocks of 64, and values lie in FIRST.

Forward: one warpgroup multiplies queries with keys and takes the softmax; two multiply weights with values, each for half
of the channels, and gather these of later keys into a ring in shared memory. Backward: one warpgroup multiplies queries
with keys, one gradients of the output with values, both from registers, and they gather half of the keys each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

HEADS = gl.constexpr(64)
HEAVY = gl.constexpr(0.75)
"""See `device_code`."""
_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def _tile(rows, columns):
    """Return the layout of a tile of bfloat16 or float16 that the matrix unit reads."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


@gluon.constexpr_function
def _sums(columns):
    """Return the layout in which a warpgroup holds float32 sums of 64 rows."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, min(columns, 256), 16])


@gluon.constexpr_function
def _gathered(columns):
    """Return the layout in which a warpgroup copies rows, 16 bytes a thread."""
    across = min(8, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def _choices(indices, start, slots, FIRST: gl.constexpr, REST: gl.constexpr, SLOTS: gl.constexpr):
    """Load the choices of a tile of slots, -1 behind the last slot, as threads take them that copy halves, and those that copy the rest."""
    SMALL: gl.constexpr = REST if REST > 0 else 16
    slot = start + gl.arange(0, SLOTS, layout=gl.SliceLayout(1, _gathered(FIRST // 2)))
    of_rest = start + gl.arange(0, SLOTS, layout=gl.SliceLayout(1, _gathered(SMALL)))
    return (
        gl.load(indices + slot, mask=slot < slots, other=-1),
        gl.load(indices + of_rest, mask=of_rest < slots, other=-1),
    )


@gluon.jit
def _copy(k, index, keys, begin, end, k_row, tile, CHANNELS: gl.constexpr):
    """Begin to copy some channels of the keys of a tile of slots; zeros where there is no choice."""
    channel = begin + gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, _gathered(CHANNELS)))
    chosen = (index >= 0) & (index < keys)
    at = k + gl.where(chosen, index, 0).to(gl.int64)[:, None] * k_row + channel[None, :]
    async_copy.async_copy_global_to_shared(tile, at, mask=chosen[:, None] & (channel < end)[None, :])


@gluon.jit
def _copy_half(
    k,
    index,
    of_rest,
    ring,
    keys,
    dim,
    k_row,
    k_first,
    k_rest,
    full,
    FIRST: gl.constexpr,
    REST: gl.constexpr,
    HALF: gl.constexpr,
):
    """Begin to copy one half of the keys of a tile of slots, the rest of the channels with the second one."""
    CHANNELS: gl.constexpr = FIRST // 2
    first, rest, copied = k_first.index(ring), k_rest.index(ring), full.index(ring)
    part = first.slice(HALF * CHANNELS, CHANNELS, dim=1)
    _copy(k, index, keys, HALF * CHANNELS, FIRST, k_row, part, CHANNELS)
    if REST > 0 and HALF == 1:
        _copy(k, of_rest, keys, FIRST, dim, k_row, rest, REST)
    async_copy.mbarrier_arrive(copied, increment_count=False)


@gluon.jit
def _gather_half(
    k,
    indices,
    start,
    ring,
    keys,
    slots,
    dim,
    k_row,
    k_first,
    k_rest,
    full,
    FIRST: gl.constexpr,
    REST: gl.constexpr,
    SLOTS: gl.constexpr,
    HALF: gl.constexpr,
):
    """Load the choices of a tile of slots, and begin to copy one half of their keys."""
    index, of_rest = _choices(indices, start, slots, FIRST, REST, SLOTS)
    _copy_half(k, index, of_rest, ring, keys, dim, k_row, k_first, k_rest, full, FIRST, REST, HALF)


@gluon.jit
def _from_registers(at, heads, head, begin, end, row, COLUMNS: gl.constexpr, SLOTS: gl.constexpr):
    """Load 64 rows of queries as a left operand that stays in registers; products have SLOTS columns."""
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=_sums(SLOTS), k_width=2)
    rows = head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, layout))
    channel = begin + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    inside = (rows < heads)[:, None] & (channel < end)[None, :]
    return gl.load(at + rows.to(gl.int64)[:, None] * row + channel[None, :], mask=inside, other=0.0)


@gluon.jit
def _weigh(
    q,
    q_first,
    k_first,
    k_rest,
    weights,
    shrunk,
    asked,
    full,
    weighed,
    used,
    indices,
    count,
    sink,
    lse,
    place,
    head,
    heads,
    keys,
    slots,
    dim,
    q_head,
    factor,
    FIRST: gl.constexpr,
    REST: gl.constexpr,
    SLOTS: gl.constexpr,
    RING: gl.constexpr,
    SINK: gl.constexpr,
    POSITIVE: gl.constexpr,
):
    """Take the softmax of each tile of scores, and hand on weights and by how much older sums shrink."""
    layout: gl.constexpr = _sums(SLOTS)
    column: gl.constexpr = gl.SliceLayout(1, layout)
    tiles = gl.cdiv(count, SLOTS)
    rows = head + gl.arange(0, HEADS, layout=column)
    if SINK:
        largest = gl.load(sink + rows, mask=rows < heads, other=0.0).to(gl.float32) * _LOG2_E
        total = gl.full([HEADS], 1.0, gl.float32, layout=column)
    else:
        largest = gl.full([HEADS], float("-inf"), gl.float32, layout=column)
        total = gl.full([HEADS], 0.0, gl.float32, layout=column)
    if REST > 0:
        q_rest = _from_registers(q, heads, head, FIRST, dim, q_head, REST, SLOTS)
    slot = gl.arange(0, SLOTS, layout=gl.SliceLayout(0, layout))
    nothing = gl.zeros([HEADS, SLOTS], gl.float32, layout=layout)
    # Of a positive factor the largest score stays the largest, and its product joins the subtraction.
    unit = factor if POSITIVE else 1.0
    index = gl.load(indices + slot, mask=slot < slots, other=-1)
    # The output is divided by the sum of weights as they are multiplied, rounded: its shares add up to 1. A tile's are
    # added while the next one's scores are made.
    rounded_total = total
    rounded = gl.zeros([HEADS, SLOTS], weights.dtype, layout=layout)
    less = gl.full([HEADS], 1.0, gl.float32, layout=column)
    mbarrier.wait(asked, 0)
    fence_async_shared()
    for tile in range(tiles):
        turn = tile % 2
        ring = tile % RING
        mbarrier.wait(full.index(ring), (tile // RING) & 1)
        fence_async_shared()
        score = warpgroup_mma(q_first, k_first.index(ring).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if REST > 0:
            score = warpgroup_mma(q_rest, k_rest.index(ring).permute((1, 0)), score, is_async=True)
        chosen = (index >= 0) & (index < keys)
        ahead = slot + (tile + 1) * SLOTS
        index = gl.load(indices + ahead, mask=ahead < slots, other=-1)
        rounded_total = rounded_total * less + gl.sum(rounded.to(gl.float32), axis=1)
        score = warpgroup_mma_wait(0, deps=[score])
        if not POSITIVE:
            score = score * factor
        score = gl.where(chosen[None, :], score, float("-inf"))
        above = gl.maximum(largest, gl.max(score, axis=1) * unit)
        base = gl.where(above == float("-inf"), 0.0, above)
        weight = gl.exp2(score * unit - base[:, None])
        less = gl.exp2(largest - base)
        total = total * less + gl.sum(weight, axis=1)
        largest = above
        mbarrier.wait(used.index(turn), ((tile // 2) & 1) ^ 1)
        rounded = weight.to(weights.dtype)
        weights.index(turn).store(rounded)
        shrunk.index(turn).store(less)
        fence_async_shared()
        mbarrier.arrive(weighed.index(turn), count=1)
    rounded_total = rounded_total * less + gl.sum(rounded.to(gl.float32), axis=1)
    turn = tiles % 2
    mbarrier.wait(used.index(turn), ((tiles // 2) & 1) ^ 1)
    shrunk.index(turn).store(1.0 / gl.where(rounded_total == 0.0, 1.0, rounded_total))
    mbarrier.arrive(weighed.index(turn), count=1)
    gl.store(lse + place + rows, (largest + gl.log2(total)) * _LN_2, mask=rows < heads)


@gluon.jit
def _add_values(
    k,
    q_first,
    k_first,
    k_rest,
    weights,
    shrunk,
    full,
    weighed,
    used,
    indices,
    out,
    remainder,
    count,
    place,
    head,
    heads,
    keys,
    slots,
    dim,
    value,
    k_row,
    FIRST: gl.constexpr,
    REST: gl.constexpr,
    SLOTS: gl.constexpr,
    RING: gl.constexpr,
    KEEPS: gl.constexpr,
    HALF: gl.constexpr,
):
    """Gather half of the channels of keys, add up their weighted values, and write them."""
    CHANNELS: gl.constexpr = FIRST // 2
    layout: gl.constexpr = _sums(CHANNELS)
    column: gl.constexpr = gl.SliceLayout(1, layout)
    tiles = gl.cdiv(count, SLOTS)
    for tile in gl.static_range(RING):
        _gather_half(
            *(k, indices, tile * SLOTS, tile, keys, slots, dim, k_row, k_first, k_rest, full),
            FIRST,
            REST,
            SLOTS,
            HALF,
        )
    # A tile ahead, or a copy waits for its choices to come from memory.
    coming, coming_of_rest = _choices(indices, RING * SLOTS, slots, FIRST, REST, SLOTS)
    sum = gl.zeros([HEADS, CHANNELS], gl.float32, layout=layout)
    for tile in range(tiles):
        turn = tile % 2
        ring = tile % RING
        mbarrier.wait(weighed.index(turn), (tile // 2) & 1)
        sum = sum * shrunk.index(turn).load(column)[:, None]
        values = k_first.index(ring).slice(HALF * CHANNELS, CHANNELS, dim=1)
        sum = warpgroup_mma(weights.index(turn), values, sum, is_async=True)
        sum = warpgroup_mma_wait(0, deps=[sum])
        mbarrier.arrive(used.index(turn), count=1)
        if tile + RING < tiles:
            # This half is not read any more: its scores were taken before its weights came.
            _copy_half(k, coming, coming_of_rest, ring, keys, dim, k_row, k_first, k_rest, full, FIRST, REST, HALF)
        coming, coming_of_rest = _choices(indices, (tile + RING + 1) * SLOTS, slots, FIRST, REST, SLOTS)
    turn = tiles % 2
    mbarrier.wait(weighed.index(turn), (tiles // 2) & 1)
    sum = sum * shrunk.index(turn).load(column)[:, None]
    # Queries are not read any more: through their place go rows of 128 bytes, where registers hold pairs of channels.
    part = q_first.slice(HALF * CHANNELS, CHANNELS, dim=1)
    part.store(sum.to(out.dtype.element_ty))
    if KEEPS:
        # Read again, or sums and rounded sums would both have to lie in registers.
        rounded = part.load(layout).to(gl.float32)
        steps = sum.to(gl.int32, bitcast=True) - rounded.to(gl.int32, bitcast=True)
        rows = head + gl.arange(0, HEADS, layout=column)
        channel = HALF * CHANNELS + gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, layout))
        at = remainder + (place + rows)[:, None] * value + channel[None, :]
        inside = (rows < heads)[:, None] & (channel < value)[None, :]
        gl.store(at, gl.minimum(gl.maximum(steps, -32768), 32767).to(gl.int16), mask=inside)
    whole: gl.constexpr = _gathered(CHANNELS)
    rows = head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, whole))
    channel = HALF * CHANNELS + gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, whole))
    at = out + (place + rows)[:, None] * value + channel[None, :]
    gl.store(at, part.load(whole), mask=(rows < heads)[:, None] & (channel < value)[None, :])
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def attend_rows(
    q,
    k,
    indices,
    counts,
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
    FIRST: gl.constexpr,
    REST: gl.constexpr,
    SLOTS: gl.constexpr,
    RING: gl.constexpr,
    SINK: gl.constexpr,
    POSITIVE: gl.constexpr,
    KEEPS: gl.constexpr,
):
    """Write the output and the log-sum-exp of 64 heads of a row; KEEPS: also the rounding error of the output."""
    kind: gl.constexpr = q.dtype.element_ty
    blocks = gl.cdiv(heads, HEADS)
    row = gl.program_id(0) // blocks
    head = (gl.program_id(0) % blocks) * HEADS
    query = (row // batch).to(gl.int64)
    element = (row % batch).to(gl.int64)
    q += query * q_row + element * q_batch
    k += element * k_batch
    indices += element * i_batch + query * i_row
    place = (query * batch + element) * heads
    count = gl.load(counts + row)
    # A program without a rest has a small tile of it that it never touches.
    LESS: gl.constexpr = REST if REST > 0 else 16
    FEW: gl.constexpr = SLOTS if REST > 0 else 16
    q_first = gl.allocate_shared_memory(kind, [HEADS, FIRST], _tile(HEADS, FIRST))
    k_first = gl.allocate_shared_memory(kind, [RING, SLOTS, FIRST], _tile(SLOTS, FIRST))
    k_rest = gl.allocate_shared_memory(kind, [RING, FEW, LESS], _tile(FEW, LESS))
    weights = gl.allocate_shared_memory(kind, [2, HEADS, SLOTS], _tile(HEADS, SLOTS))
    shrunk = gl.allocate_shared_memory(gl.float32, [2, HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(asked, count=128)
    for each in gl.static_range(RING):
        mbarrier.init(full.index(each), count=256)
    for each in gl.static_range(2):
        mbarrier.init(weighed.index(each), count=1)
        mbarrier.init(used.index(each), count=2)
    fence_async_shared()
    gl.thread_barrier()
    whole: gl.constexpr = _gathered(FIRST)
    rows = head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, whole))
    channel = gl.arange(0, FIRST, layout=gl.SliceLayout(0, whole))
    at = q + rows.to(gl.int64)[:, None] * q_head + channel[None, :]
    async_copy.async_copy_global_to_shared(q_first, at, mask=(rows < heads)[:, None] & (channel < dim)[None, :])
    async_copy.mbarrier_arrive(asked, increment_count=False)
    gl.warp_specialize(
        [
            (
                _weigh,
                (
                    q,
                    q_first,
                    k_first,
                    k_rest,
                    weights,
                    shrunk,
                    asked,
                    full,
                    weighed,
                    used,
                    indices,
                    count,
                    sink,
                    lse,
                    place,
                    head,
                    heads,
                    keys,
                    slots,
                    dim,
                    q_head,
                    factor,
                    FIRST,
                    REST,
                    SLOTS,
                    RING,
                    SINK,
                    POSITIVE,
                ),
            ),
            (
                _add_values,
                (
                    k,
                    q_first,
                    k_first,
                    k_rest,
                    weights,
                    shrunk,
                    full,
                    weighed,
                    used,
                    indices,
                    out,
                    remainder,
                    count,
                    place,
                    head,
                    heads,
                    keys,
                    slots,
                    dim,
                    value,
                    k_row,
                    FIRST,
                    REST,
                    SLOTS,
                    RING,
                    KEEPS,
                    0,
                ),
            ),
            (
                _add_values,
                (
                    k,
                    q_first,
                    k_first,
                    k_rest,
                    weights,
                    shrunk,
                    full,
                    weighed,
                    used,
                    indices,
                    out,
                    remainder,
                    count,
                    place,
                    head,
                    heads,
                    keys,
                    slots,
                    dim,
                    value,
                    k_row,
                    FIRST,
                    REST,
                    SLOTS,
                    RING,
                    KEEPS,
                    1,
                ),
            ),
        ],
        [4, 4],
        [168, 168],
    )


@gluon.jit
def _take_weights(
    q,
    k,
    k_first,
    k_rest,
    passed,
    full,
    empty,
    ready,
    used,
    indices,
    count,
    lse,
    weights,
    place,
    kept,
    head,
    heads,
    keys,
    slots,
    dim,
    q_head,
    k_row,
    factor,
    FIRST: gl.constexpr,
    REST: gl.constexpr,
    SLOTS: gl.constexpr,
    RING: gl.constexpr,
):
    """Take the weights of each tile from queries and keys, keep them and hand them on."""
    layout: gl.constexpr = _sums(SLOTS)
    column: gl.constexpr = gl.SliceLayout(1, layout)
    tiles = gl.cdiv(count, SLOTS)
    for tile in gl.static_range(RING):
        _gather_half(
            *(k, indices, tile * SLOTS, tile, keys, slots, dim, k_row, k_first, k_rest, full),
            FIRST,
            REST,
            SLOTS,
            0,
        )
    q_first = _from_registers(q, heads, head, 0, FIRST, q_head, FIRST, SLOTS)
    if REST > 0:
        q_rest = _from_registers(q, heads, head, FIRST, dim, q_head, REST, SLOTS)
    rows = head + gl.arange(0, HEADS, layout=column)
    base = gl.load(lse + place + rows, mask=rows < heads, other=0.0) * _LOG2_E
    base = gl.where(base == float("-inf"), 0.0, base)
    slot = gl.arange(0, SLOTS, layout=gl.SliceLayout(0, layout))
    nothing = gl.zeros([HEADS, SLOTS], gl.float32, layout=layout)
    index = gl.load(indices + slot, mask=slot < slots, other=-1)
    for tile in range(tiles):
        turn = tile % 2
        ring = tile % RING
        mbarrier.wait(full.index(ring), (tile // RING) & 1)
        fence_async_shared()
        score = warpgroup_mma(q_first, k_first.index(ring).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if REST > 0:
            score = warpgroup_mma(q_rest, k_rest.index(ring).permute((1, 0)), score, is_async=True)
        chosen = (index >= 0) & (index < keys)
        ahead = slot + (tile + 1) * SLOTS
        index = gl.load(indices + ahead, mask=ahead < slots, other=-1)
        score = warpgroup_mma_wait(0, deps=[score])
        mbarrier.arrive(empty.index(ring), count=1)
        weight = gl.exp2(gl.where(chosen[None, :], score * factor, float("-inf")) - base[:, None])
        mbarrier.wait(used.index(turn), ((tile // 2) & 1) ^ 1)
        passed.index(turn).store(weight)
        mbarrier.arrive(ready.index(turn), count=1)
        at = weights + (kept + rows)[:, None] * slots + (tile * SLOTS + slot)[None, :]
        inside = (rows < heads)[:, None] & (tile * SLOTS + slot < slots)[None, :]
        gl.store(at, weight.to(weights.dtype.element_ty), mask=inside)
        mbarrier.wait(empty.index(ring), (tile // RING) & 1)
        _gather_half(
            *(k, indices, (tile + RING) * SLOTS, ring, keys, slots, dim, k_row, k_first, k_rest, full),
            FIRST,
            REST,
            SLOTS,
            0,
        )
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _take_gradients(
    grad,
    k,
    k_first,
    k_rest,
    passed,
    full,
    empty,
    ready,
    used,
    indices,
    count,
    mean,
    due,
    of_scores,
    place,
    kept,
    head,
    heads,
    keys,
    slots,
    dim,
    value,
    g_head,
    k_row,
    FIRST: gl.constexpr,
    REST: gl.constexpr,
    SLOTS: gl.constexpr,
    RING: gl.constexpr,
):
    """Take the gradients of the scores of each tile from gradients of the output, values and weights, and keep them.

    The gradient of a heavy slot is `due` less those of the others, see `device_code.query_side`.
    """
    layout: gl.constexpr = _sums(SLOTS)
    column: gl.constexpr = gl.SliceLayout(1, layout)
    tiles = gl.cdiv(count, SLOTS)
    for tile in gl.static_range(RING):
        _gather_half(
            *(k, indices, tile * SLOTS, tile, keys, slots, dim, k_row, k_first, k_rest, full),
            FIRST,
            REST,
            SLOTS,
            1,
        )
    grads = _from_registers(grad, heads, head, 0, value, g_head, FIRST, SLOTS)
    rows = head + gl.arange(0, HEADS, layout=column)
    middle = gl.load(mean + place + rows, mask=rows < heads, other=0.0)
    others = gl.zeros([HEADS], gl.float32, layout=column)
    heavy = gl.full([HEADS], -1, gl.int32, layout=column)
    slot = gl.arange(0, SLOTS, layout=gl.SliceLayout(0, layout))
    nothing = gl.zeros([HEADS, SLOTS], gl.float32, layout=layout)
    for tile in range(tiles):
        turn = tile % 2
        ring = tile % RING
        mbarrier.wait(full.index(ring), (tile // RING) & 1)
        fence_async_shared()
        of_weight = warpgroup_mma(grads, k_first.index(ring).permute((1, 0)), nothing, use_acc=False, is_async=True)
        of_weight = warpgroup_mma_wait(0, deps=[of_weight])
        mbarrier.arrive(empty.index(ring), count=1)
        mbarrier.wait(empty.index(ring), (tile // RING) & 1)
        _gather_half(
            *(k, indices, (tile + RING) * SLOTS, ring, keys, slots, dim, k_row, k_first, k_rest, full),
            FIRST,
            REST,
            SLOTS,
            1,
        )
        mbarrier.wait(ready.index(turn), (tile // 2) & 1)
        weight = passed.index(turn).load(layout)
        mbarrier.arrive(used.index(turn), count=1)
        place_of_slot = tile * SLOTS + slot
        is_heavy = weight > HEAVY
        heavy = gl.maximum(heavy, gl.max(gl.where(is_heavy, place_of_slot[None, :], -1), axis=1))
        of_score = gl.where(is_heavy, 0.0, weight * (of_weight - middle[:, None]))
        others += gl.sum(of_score, axis=1)
        at = of_scores + (kept + rows)[:, None] * slots + place_of_slot[None, :]
        inside = (rows < heads)[:, None] & (place_of_slot < slots)[None, :]
        gl.store(at, of_score.to(of_scores.dtype.element_ty), mask=inside & ~is_heavy)
    of_heavy = gl.load(due + place + rows, mask=rows < heads, other=0.0) - others
    at = of_scores + (kept + rows) * slots + heavy
    gl.store(at, of_heavy.to(of_scores.dtype.element_ty), mask=(rows < heads) & (heavy >= 0))
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def score_side(
    q,
    k,
    indices,
    counts,
    grad,
    lse,
    mean,
    due,
    weights,
    of_scores,
    row_start,
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
    g_row,
    g_batch,
    g_head,
    FIRST: gl.constexpr,
    REST: gl.constexpr,
    SLOTS: gl.constexpr,
    RING: gl.constexpr,
):
    """Keep weights and gradients of scores of 64 heads of a row, (rows, heads, slots)."""
    kind: gl.constexpr = q.dtype.element_ty
    blocks = gl.cdiv(heads, HEADS)
    local = gl.program_id(0) // blocks
    row = row_start + local
    head = (gl.program_id(0) % blocks) * HEADS
    query = (row // batch).to(gl.int64)
    element = (row % batch).to(gl.int64)
    q += query * q_row + element * q_batch
    grad += query * g_row + element * g_batch
    k += element * k_batch
    indices += element * i_batch + query * i_row
    place = (query * batch + element) * heads
    kept = local.to(gl.int64) * heads
    count = gl.load(counts + row)
    LESS: gl.constexpr = REST if REST > 0 else 16
    FEW: gl.constexpr = SLOTS if REST > 0 else 16
    k_first = gl.allocate_shared_memory(kind, [RING, SLOTS, FIRST], _tile(SLOTS, FIRST))
    k_rest = gl.allocate_shared_memory(kind, [RING, FEW, LESS], _tile(FEW, LESS))
    passed = gl.allocate_shared_memory(gl.float32, [2, HEADS, SLOTS], gl.SwizzledSharedLayout(4, 2, 8, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(RING):
        mbarrier.init(full.index(each), count=256)
        mbarrier.init(empty.index(each), count=2)
    for each in gl.static_range(2):
        mbarrier.init(ready.index(each), count=1)
        mbarrier.init(used.index(each), count=1)
    gl.warp_specialize(
        [
            (
                _take_weights,
                (
                    q,
                    k,
                    k_first,
                    k_rest,
                    passed,
                    full,
                    empty,
                    ready,
                    used,
                    indices,
                    count,
                    lse,
                    weights,
                    place,
                    kept,
                    head,
                    heads,
                    keys,
                    slots,
                    dim,
                    q_head,
                    k_row,
                    factor,
                    FIRST,
                    REST,
                    SLOTS,
                    RING,
                ),
            ),
            (
                _take_gradients,
                (
                    grad,
                    k,
                    k_first,
                    k_rest,
                    passed,
                    full,
                    empty,
                    ready,
                    used,
                    indices,
                    count,
                    mean,
                    due,
                    of_scores,
                    place,
                    kept,
                    head,
                    heads,
                    keys,
                    slots,
                    dim,
                    value,
                    g_head,
                    k_row,
                    FIRST,
                    REST,
                    SLOTS,
                    RING,
                ),
            ),
        ],
        [4],
        [240],
    )
