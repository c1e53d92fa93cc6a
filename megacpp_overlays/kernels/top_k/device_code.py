"""The device code of the top-k: see `in_triton`, which launches it.

A number becomes an integer that is ordered as numbers are, and a row is held in registers. The smallest number that is
chosen is found by halving the interval between the smallest and the largest of the row, and counting.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether functions run in Triton's interpreter, on CPU tensors."""
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITE, _NAN = tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)
"""Bits of infinity, and of the NaN that stands for all of them."""
_LOWEST = tl.constexpr(-0x7F800001)
"""What becomes of negative infinity."""
_PADDING = tl.constexpr(-0x80000000)


@triton.jit
def _ordered(value):
    """Return integers in the order of the numbers; 0 for both zeros, one integer for all NaNs."""
    if (
        value.dtype == tl.bfloat16
    ):  # the upper half of a float32; the interpreter takes other numbers for subnormal ones
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & _MAGNITUDE
    # As integers, so that no mode of the compiler takes a subnormal number for 0.
    ordered = tl.where(bits < 0, bits ^ _MAGNITUDE, bits)
    ordered = tl.where(magnitude == 0, 0, ordered)
    return tl.where(magnitude > _INFINITE, _NAN, ordered)


@triton.jit
def _count(chosen):
    return tl.sum(chosen.to(tl.int32), axis=0)


@triton.jit
def _threshold(key, inside, k):
    """Return an integer that at least k of the keys reach, and above which are fewer than k; or which exactly k reach."""
    low = tl.min(tl.where(inside, key, _MAGNITUDE), axis=0)
    high = tl.max(key, axis=0) + 1
    # k or more reach `low`, fewer reach `high`. Where the smallest number itself is chosen, as negative infinity is in
    # the first rows under a causal mask, one look is enough.
    high = tl.where(_count(key > low) < k, low + 1, high)
    while low < high - 1:
        middle = (low & high) + ((low ^ high) >> 1)  # without the sum, which may need 33 bits
        reach = _count(key >= middle)
        low = tl.where(reach >= k, middle, low)
        high = tl.where(reach == k, middle + 1, tl.where(reach < k, middle, high))
    return low


@triton.jit
def _load(row, column, keys):
    """Return ordered integers of some numbers of a row, and which of them there are."""
    inside = column < keys
    key = _ordered(tl.load(row + column, mask=inside, other=0.0))
    return tl.where(inside, key, _PADDING), inside


@triton.jit
def choose_rows(scores, out, keys, k, row_stride, MARKED: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """Write the positions of the k largest of one row, int64, in ascending order."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * row_stride
    out += row * k
    whole, inside = _load(scores, tl.arange(0, COLUMNS), keys)
    low = _threshold(whole, inside, k)
    wanted = k - _count(whole > low)
    # The row once more, from the cache and in parts: positions of all of it at once would take the registers of others.
    above_before, equal_before = 0, 0
    for first in range(0, keys, CHUNK):
        column = first + tl.arange(0, CHUNK)
        key, _ = _load(scores, column, keys)
        is_above, is_equal = (key > low).to(tl.int32), (key == low).to(tl.int32)
        # How many are above and how many are equal, up to each place, in the two halves of one integer.
        both = (is_above << 16) + is_equal
        upto = tl.cumsum(both, axis=0)
        of_chunk = tl.sum(both, axis=0)
        equal = equal_before + (upto & 0xFFFF)
        chosen = (key > low) | ((key == low) & (equal <= wanted))
        place = above_before + (upto >> 16) + tl.minimum(equal, wanted) - 1
        position = column
        if MARKED:
            position = tl.where(key == _LOWEST, -1, column)
        tl.store(out + place, position.to(tl.int64), mask=chosen)
        above_before += of_chunk >> 16
        equal_before += of_chunk & 0xFFFF
