"""The device code of the top-k: see `in_triton`, which launches it.

A row is held in registers, 16 or more numbers a thread. The smallest number that is chosen is found by counting how many
reach a guess; guesses are interpolated between two numbers that were counted, and after a while halve what is left.
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
def _load(row, column, keys):
    """Return numbers of a row in float32: infinity for a NaN, and negative infinity where the row has ended."""
    value = tl.load(row + column, mask=column < keys, other=-_INFINITY)
    if value.dtype == tl.bfloat16:  # the upper half of a float32; the interpreter converts subnormal ones to others
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) << 16
        number = bits.to(tl.float32, bitcast=True)
    else:
        number = value.to(tl.float32)
    return tl.where(number != number, _INFINITY, number)


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
def _write(numbers, column, out, low, equal, before, is_exact):
    """Write the positions of some numbers of a row that reach `low`, of equal ones the first `equal`; return what is next."""
    if not is_exact:
        is_equal = numbers == low
        rank, found = _ranks(is_equal.to(tl.int32))
        numbers = tl.where(is_equal, tl.where(rank > equal, -_INFINITY, _INFINITY), numbers)
        low = tl.maximum(low, _LOWEST)
        equal -= found
    chosen = numbers >= low
    rank, found = _ranks(chosen.to(tl.int32))
    tl.store(out + before + rank - 1, column.to(tl.int64), mask=chosen)
    return equal, before + found


@triton.jit
def choose_rows(
    scores, out, keys, k, row_stride,
    MARKED: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the positions of the k largest of one row, int64, in ascending order; see `top_k.function.choose`.

    The row is GROUPS groups of GROUP numbers that follow each other. Positions are written in so many parts, for which it
    is read again if there are several: the ranks of all of it at once would take the registers of others.
    """
    row = tl.program_id(0).to(tl.int64)
    scores += row * row_stride
    out += row * k
    place = tl.arange(0, GROUP)[:, None]
    column = tl.arange(0, GROUPS)[None, :] * GROUP + place
    numbers = _load(scores, column, keys)
    low, is_exact = _threshold(numbers, k)
    equal = 0
    if MARKED and low == -_INFINITY:
        low, is_exact = _LOWEST, True
        for first in range(_count(numbers >= low), k, _FILLED):
            rest = first + tl.arange(0, _FILLED)
            tl.store(out + rest, tl.full((_FILLED,), -1, tl.int64), mask=rest < k)
    elif not is_exact:
        equal = k - _count(numbers > low)
    if PARTS == 1:
        _write(numbers, column, out, low, equal, 0, is_exact)
    else:
        before = 0
        of_part = tl.arange(0, GROUPS // PARTS)[None, :] * GROUP + place
        for first in range(0, keys, GROUP * (GROUPS // PARTS)):
            part = _load(scores, first + of_part, keys)
            equal, before = _write(part, first + of_part, out, low, equal, before, is_exact)
