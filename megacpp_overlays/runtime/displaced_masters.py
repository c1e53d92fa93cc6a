"""Detect fp32 master weights that are shifted or zero-padded copies of another parameter's.

`DistributedOptimizer` of megatron-core 0.15.0 to 0.19.2 can write wrong fully reshardable checkpoints: it cuts the optimizer
state of a parameter from a place too far on in its grad buffer. The checkpoint does not record this. The model's weights reveal
it, because a right master, rounded to the weight's dtype, is the weight. Masters can differ for other reasons, such as weights
stored in FP8. Two marks identify this defect:

    displacement   `master[i]` is `weight[i + n]`, from the beginning of each shard that was written to the end of its data
    zero tail      masters and all moments end in zeros where the weight does not: the buffer ended before the parameter

A displacement proves the defect. A zero tail only suggests it: a parameter that grew on loading, such as a vocabulary padded to
more rows, ends in zeros, too, and so do rows that were never trained. Where the masters ahead of the zeros are the weight's own,
the state was cut at the right place, and the zeros are no mark.

Tensors are read in blocks, so a parameter of any size takes some tens of MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

BLOCK = 1 << 22
"""Elements that are read at once."""
_WINDOW = 32
"""Length of the window of masters that is searched for in the weight. A parameter no longer than two of them has none."""
_WINDOWS = 64
"""Windows that are tried until one has enough distinct numbers."""
_DISTINCT = 8
"""Distinct numbers that identify a parameter of one model, and a place in it."""
_EQUAL_BY_CHANCE = 4
"""Limit of elements behind a shard that equal the weight by chance: in bfloat16 one of some hundred does."""
_FIRST_READ = 1024
"""Elements that are read first to count distinct numbers; most parameters need no more."""


class Values(Protocol):
    """Flattened tensor that is read in parts."""

    @property
    def numel(self) -> int:
        """Return the number of elements."""

    def read(self, start: int, stop: int) -> Any:
        """Return elements `start` to `stop` as a plain CPU tensor of their own dtype."""


class TensorValues:
    """Flattened tensor in memory, on any device."""

    def __init__(self, tensor: Any) -> None:
        self._flat = tensor.detach().reshape(-1)

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return int(self._flat.numel())

    def read(self, start: int, stop: int) -> Any:
        """Return elements `start` to `stop` on the CPU."""
        return self._flat[start:stop].cpu()


class Marks(NamedTuple):
    """Result of the comparison of masters with their weight, for one parameter or one shard of it."""

    differs: bool
    """Whether any master differs from its weight by more than a unit in the last place of the weight's dtype."""
    displaced_by: int = 0
    """Elements by which the masters are shifted; 0 where they are not, or are too few to tell."""
    zero_tail: int = 0
    """Elements at the end that are 0 in masters and moments where the weight has other numbers."""

    @property
    def shows_the_defect(self) -> bool:
        """Whether there is a displacement or a zero tail."""
        return bool(self.displaced_by or self.zero_tail)


class _Shift(NamedTuple):
    """Hypothesis that `master[i]` is `weight[i + ahead]`."""

    master: Values
    weight: Values
    ahead: int
    end: int
    """End of the masters to compare. Zeros follow, as in a parameter that grew."""

    @property
    def limit(self) -> int:
        """End of the masters that have a counterpart in the weight."""
        return min(self.end, self.weight.numel - self.ahead)

    def first_mismatch(self, start: int, stop: int) -> int | None:
        """Return the first place that contradicts the hypothesis, or None."""
        return first_difference(self.master, self.weight, start, stop, self.ahead)


def marks(master: Values, weight: Values, moments: Sequence[Values]) -> Marks:
    """Compare the masters of a parameter with the model's weight.

    Args:
        master: fp32.
        weight: bf16, fp16 or fp32, of the same length.
        moments: those saved with the masters, fp32, each of the same length.
    """
    first = first_difference(master, weight)
    if first is None:
        return Marks(differs=False)
    return Marks(True, displacement(master, weight, first), zero_tail(master, weight, moments))


def first_difference(
    master: Values, weight: Values, start: int = 0, stop: int | None = None, ahead: int = 0
) -> int | None:
    """Return the first `i` from `start` to `stop` at which `master[i]` is not `weight[i + ahead]`, or None."""
    stop = weight.numel - ahead if stop is None else stop
    for block in range(start, stop, BLOCK):
        end = min(block + BLOCK, stop)
        differs = ~_equals_rounded(master.read(block, end), weight.read(block + ahead, end + ahead))
        if bool(differs.any()):
            return block + int(differs.nonzero()[0])
    return None


def displacement(master: Values, weight: Values, first: int) -> int:
    """Return the number of elements by which all masters are shifted against the weight, or 0.

    A window of masters is searched for in the weight. The distance at which it is found is then verified on all masters.

    Args:
        master: fp32.
        weight: bf16, fp16 or fp32, of the same length.
        first: a place at which they differ; the window is chosen from there on.
    """
    end = master.numel - _trailing_zeros(master)
    last = min(first + _WINDOWS * _WINDOW, weight.numel - 2 * _WINDOW, end - _WINDOW + 1)
    for at in range(first, last, _WINDOW):
        window = master.read(at, at + _WINDOW)
        if len(window.to(weight.read(at, at + 1).dtype).unique()) < _DISTINCT:
            continue
        found = _find(window, weight, at + 1)
        if found is None:
            return 0
        shift = _Shift(master, weight, found - at, end)
        return shift.ahead if _fits_all_shards(shift, at + _WINDOW) else 0
    return _short_displacement(master, weight, end)


def _fits_all_shards(shift: _Shift, window_end: int) -> bool:
    """Return whether a shift holds in each shard that was written.

    Each rank of tensor parallelism wrote a shard whose last `ahead` masters are those of other parameters. Fewer ranks that
    load it have several such shards in a row. The first mismatch ends the matching part of the first shard, which tells
    the length of all.

    Args:
        shift: the hypothesis.
        window_end: end of the window that suggested it; the matching part is not shorter.
    """
    mismatch = shift.first_mismatch(0, shift.limit)
    if mismatch is None or mismatch + shift.ahead >= shift.end:
        return True
    shortest = max(mismatch - _EQUAL_BY_CHANCE + 1, window_end, 1)
    return any(_fits_shards_of(shift, matching) for matching in range(mismatch, shortest - 1, -1))


def _fits_shards_of(shift: _Shift, matching: int) -> bool:
    """Return whether a shift holds in all shards behind the first, if the first `matching` masters of each are to match."""
    starts = range(matching + shift.ahead, shift.end, matching + shift.ahead)
    parts = [(start, min(start + matching, shift.limit)) for start in starts]
    return all(stop - start >= _DISTINCT and shift.first_mismatch(start, stop) is None for start, stop in parts)


def _short_displacement(master: Values, weight: Values, end: int) -> int:
    """Return the displacement of a parameter that has no window, or 0.

    The candidate is the number of trailing zeros: they pad the values that the buffer lacked, if the parameter was its last one.
    """
    zeros = master.numel - end
    if not zeros or not has_many_numbers(master, end):
        return 0
    return zeros if end <= weight.numel - zeros and first_difference(master, weight, 0, end, zeros) is None else 0


def zero_tail(master: Values, weight: Values, moments: Sequence[Values]) -> int:
    """Return the number of elements at the end that are 0 in masters and moments.

    The result is 0 where the weight, too, has only zeros there, or where the masters ahead of them are the weight's own.
    """
    length = weight.numel
    for each in (master, *moments):
        length = min(length, _trailing_zeros(each)) if length else 0  # most masters have none: no moment is read
    start = weight.numel - length
    if has_many_numbers(weight, start) and first_difference(master, weight, 0, start) is None:
        return 0
    for block in range(start, weight.numel, BLOCK):
        if bool(weight.read(block, min(block + BLOCK, weight.numel)).any()):
            return length
    return 0


def has_many_numbers(values: Values, stop: int, start: int = 0) -> bool:
    """Return whether elements `start` to `stop` have enough distinct numbers to identify a parameter."""
    import torch

    distinct = torch.empty(0)
    width = _FIRST_READ
    while start < stop and len(distinct) < _DISTINCT:
        end = min(start + width, stop)
        distinct = torch.cat([distinct, values.read(start, end).float()]).unique()
        start, width = end, BLOCK
    return len(distinct) >= _DISTINCT


def _trailing_zeros(values: Values) -> int:
    """Return the number of zeros at the end."""
    end = values.numel
    while end:
        start = max(end - BLOCK, 0)
        others = values.read(start, end).nonzero()
        if len(others):
            return values.numel - (start + int(others[-1]) + 1)
        end = start
    return values.numel


def _find(window: Any, weight: Values, start: int) -> int | None:
    """Return the first place of the weight, from `start` on, at which it equals the window, or None."""
    width = len(window)
    for block in range(start, weight.numel - width + 1, BLOCK):
        read = weight.read(block, min(block + BLOCK + width - 1, weight.numel))
        places = _equals_rounded(window[:1], read[: len(read) - width + 1]).nonzero().flatten()
        for offset in range(1, width):
            places = places[_equals_rounded(window[offset], read[places + offset])]
            if not len(places):
                break
        else:
            return block + int(places[0])
    return None


def _equals_rounded(master: Any, weight: Any) -> Any:
    """Return for each element whether the weight is the master, rounded to the weight's dtype.

    A unit in the last place is allowed: an optimizer that stores a weight and its lost bits rounds ties the other way.
    """
    import torch

    rounded, stored = master.to(weight.dtype).float(), weight.float()
    equal = (rounded == stored) | (rounded.isnan() & stored.isnan())
    if weight.dtype != torch.float32:
        equal |= (rounded - stored).abs() <= torch.finfo(weight.dtype).eps * stored.abs()
    return equal
