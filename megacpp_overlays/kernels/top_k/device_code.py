"""The device code of the top-k: see `in_triton`, which launches it.

A row is held in registers, 16 or more numbers a thread. The smallest number that is chosen is found by counting how many
reach a guess. Guesses are interpolated between two numbers that were counted; after a while they bisect the interval.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether functions run in Triton's interpreter, on CPU tensors."""
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(float("inf"))
_LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The smallest float32."""
_INTERPOLATED = tl.constexpr(16)
"""Guesses that are interpolated: rows of normal numbers need 6 to 14 of them, and halving at most 32 more."""
_CLOSED = tl.constexpr(12)
"""Guesses after which, and after as many more each time, both ends go to numbers of the row: most rows need fewer guesses, and
where many numbers are equal those that are left may all be.
"""
_FILLED = tl.constexpr(512)
"""How many places that stay without a position are written together."""
_ALIGNED = tl.constexpr(16)
"""Columns at whose multiples loads begin and end."""


@triton.jit
def _order_of(number):
    """Return an integer in the order of float32 numbers."""
    bits = number.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ _MAGNITUDE, bits)


@triton.jit
def _number_at(order):
    """Return the float32 number that has this place in the order."""
    return tl.where(order < 0, order ^ _MAGNITUDE, order).to(tl.float32, bitcast=True)


@triton.jit
def _count(chosen):
    # Sums of float32 are exact here, and a comparison that gives one is a single instruction.
    return tl.sum(tl.where(chosen, 1.0, 0.0)).to(tl.int32)


@triton.jit
def _ranks(chosen):
    """Return how many are chosen up to each place, and in all: places count along the first axis, then the second."""
    upto = tl.cumsum(chosen, axis=0)
    of_group = tl.sum(chosen, axis=0)
    before = tl.cumsum(of_group, axis=0) - of_group
    return upto + before[None, :], tl.sum(of_group, axis=0)


@triton.jit
def _load(scores, listed, column, low, high, total, BOUNDED: tl.constexpr, LISTED: tl.constexpr):
    """Return numbers of a row in float32: infinity for a NaN, and negative infinity outside of its columns.

    LISTED: a column holds the place of its number, or -1 for none. BOUNDED: the range is rounded to whole groups, which
    one instruction loads, and the numbers outside the bounds are replaced afterwards.
    """
    if LISTED:
        place = tl.load(listed + column, mask=column < high, other=-1)
        value = tl.load(scores + place, mask=place >= 0, other=-_INFINITY)
    elif BOUNDED:
        about = (column >= low // _ALIGNED * _ALIGNED) & (column < tl.cdiv(high, _ALIGNED) * _ALIGNED)
        value = tl.load(scores + column, mask=about & (column < total), other=-_INFINITY)
    else:
        value = tl.load(scores + column, mask=column < high, other=-_INFINITY)
    if value.dtype == tl.bfloat16:  # the upper half of a float32; the interpreter converts subnormal ones to others
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) << 16
        number = bits.to(tl.float32, bitcast=True)
    else:
        number = value.to(tl.float32)
    number = tl.where(number != number, _INFINITY, number)
    if BOUNDED and not LISTED:
        number = tl.where((column >= low) & (column < high), number, -_INFINITY)
    return number


@triton.jit
def _guess(low, high, above, below, looks):
    """Return a place between two others: by numbers and by places in turn, whichever suits how they are spread."""
    share = above / (above + below)
    if looks >= _INTERPOLATED:
        place = (low & high) + ((low ^ high) >> 1)  # half way, without a sum that may need 33 bits
    elif looks % 2 == 0:
        first, last = _number_at(low), _number_at(high - 1)
        place = _order_of(first + (last - first) * share)
    else:
        half = (((high >> 1) - (low >> 1)).to(tl.float32) * share).to(tl.int32)
        place = low + half + half
    return tl.minimum(tl.maximum(place, low + 1), high - 1)


@triton.jit
def _threshold(numbers, k):
    """Return a number that k or more reach while fewer exceed it, or that exactly k reach; and whether it is exactly k.

    It is negative infinity where fewer than k numbers are larger.
    """
    larger = numbers > -_INFINITY
    count = _count(larger)
    # k or more numbers reach `low`, fewer reach `high`: both are places in the order of numbers.
    low = _order_of(tl.min(tl.where(larger, numbers, _INFINITY)))
    high = _order_of(tl.max(numbers)) + 1
    low = tl.where(count < k, _order_of(tl.full((), -_INFINITY, tl.float32)), low)
    high = tl.where(count <= k, low + 1, high)
    is_exact = count == k
    # How far away from k the counts are. Of a side that stays where it is, this is halved, so that guesses come closer to it
    # (the Illinois variant of false position).
    above, below = (count - k).to(tl.float32), tl.zeros((), tl.float32) + k
    moved, looks, closed = 0, 0, 0 + _CLOSED
    while low < high - 1:
        place = _guess(low, high, above, below, looks)
        count = _count(numbers >= _number_at(place))
        is_low = count >= k
        is_exact = is_exact | (count == k)
        away = tl.abs(count - k).to(tl.float32)
        above = tl.where(is_low, away, tl.where(moved < 0, above * 0.5, above))
        below = tl.where(is_low, tl.where(moved > 0, below * 0.5, below), away)
        moved = tl.where(is_low, 1, -1)
        low = tl.where(is_low, place, low)
        high = tl.where(count == k, place + 1, tl.where(is_low, high, place))
        looks += 1
        if looks == closed:
            closed += _CLOSED
            lowest = tl.min(tl.where(numbers >= _number_at(low), numbers, _INFINITY))
            highest = tl.max(tl.where(numbers <= _number_at(high - 1), numbers, -_INFINITY))
            low, high = tl.maximum(low, _order_of(lowest)), tl.minimum(high, _order_of(highest) + 1)
    return _number_at(low), is_exact


@triton.jit
def _write(numbers, column, listed, out, low, equal, before, is_exact, high, LISTED: tl.constexpr):
    """Write the places of some numbers of a row that reach `low`, of equal ones the first `equal`.

    Return how many equal numbers are still to be taken, and the index of the next free place.

    -1 for a column that holds no number: it is taken only where others are too few.
    """
    if not is_exact:
        is_equal = numbers == low
        rank, found = _ranks(is_equal.to(tl.int32))
        numbers = tl.where(is_equal, tl.where(rank > equal, -_INFINITY, _INFINITY), numbers)
        low = tl.maximum(low, _LOWEST)
        equal -= found
    chosen = numbers >= low
    rank, found = _ranks(chosen.to(tl.int32))
    if LISTED:
        place = tl.load(listed + column, mask=chosen & (column < high), other=-1)
    else:
        place = tl.where(column < high, column, -1)
    tl.store(out + before + rank - 1, place.to(out.dtype.element_ty), mask=chosen)
    return equal, before + found


@triton.jit
def _fill(out, first, k):
    """Write -1 to the places from `first` up to k."""
    for start in range(first, k, _FILLED):
        rest = start + tl.arange(0, _FILLED)
        tl.store(out + rest, tl.full((_FILLED,), -1, out.dtype.element_ty), mask=rest < k)


@triton.jit
def choose_rows(
    scores, listed, starts, ends, out, total, span, k, queries, row_stride,
    MARKED: tl.constexpr, BOUNDED: tl.constexpr, LISTED: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the places of the k largest of some columns of a row in ascending order; see `top_k.function.choose`.

    `out` is (rows, stretches, k). A stretch is `span` columns of `total`, held as GROUPS groups of GROUP that follow each other.
    LISTED: `listed` is (rows, total), and columns hold places of scores. BOUNDED: the columns of a row are those from `starts` to
    before `ends`, (queries,). Places are written in so many parts, for which columns are read again if there are several: the
    ranks of all at once would take the registers of others.
    """
    row = tl.program_id(0).to(tl.int64)
    scores += row * row_stride
    listed += row * total
    out += (row * tl.num_programs(1) + tl.program_id(1)) * k
    first = tl.program_id(1) * span
    low_end, high_end = first, tl.minimum(first + span, total)
    if BOUNDED:
        query = row % queries
        low_end = tl.maximum(low_end, tl.load(starts + query))
        high_end = tl.minimum(high_end, tl.load(ends + query))
    if BOUNDED and low_end >= high_end:
        _fill(out, 0, k)
    else:
        place = tl.arange(0, GROUP)[:, None]
        column = first + tl.arange(0, GROUPS)[None, :] * GROUP + place
        numbers = _load(scores, listed, column, low_end, high_end, total, BOUNDED, LISTED)
        low, is_exact = _threshold(numbers, k)
        equal = 0
        if MARKED and low == -_INFINITY:
            low, is_exact = _LOWEST, True
            _fill(out, _count(numbers >= low), k)
        elif not is_exact:
            equal = k - _count(numbers > low)
        if PARTS == 1:
            _write(numbers, column, listed, out, low, equal, 0, is_exact, high_end, LISTED)
        else:
            before = 0
            of_part = tl.arange(0, GROUPS // PARTS)[None, :] * GROUP + place
            for start in range(first, first + GROUP * GROUPS, GROUP * (GROUPS // PARTS)):
                part = _load(scores, listed, start + of_part, low_end, high_end, total, BOUNDED, LISTED)
                equal, before = _write(
                    part, start + of_part, listed, out, low, equal, before, is_exact, high_end, LISTED
                )
