"""Detect fp32 master weights that were cut from the wrong place of a grad buffer.

`DistributedOptimizer` of megatron-core 0.15.0 to 0.19.2 writes fully reshardable checkpoints in which the state of a parameter
can begin too far on in its buffer. Nothing in such a checkpoint says so, but the model's own weights are in it, or in the
process that loads it. A master is the fp32 copy of a weight, and the weight is the master, rounded. Where masters are not those
of their weight, two marks tell this defect from anything else that makes them differ, such as weights that are stored in FP8:

    displaced   master[i] is weight[i + n] from the beginning of each shard that was written, for as far as there are any
    zero tail   masters and every moment end in zeros, and the weight does not: the buffer ended before the parameter did

A displacement is a proof. A zero tail is a sign only: a parameter that grew when it was loaded, as a vocabulary that is padded
to more rows, ends in zeros, too, and so do rows that were never trained. It is none where the numbers ahead of the zeros are the
weight's own, which a state that was cut elsewhere does not have.

Numbers are read in blocks, so that a parameter of any size takes some tens of MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

BLOCK = 1 << 22
"""Elements that are looked at together."""
_WINDOW = 32
"""Elements that must be alike for a place to be looked at as a whole. Also the fewest that are told by where they lie."""
_WINDOWS = 64
"""How many windows are tried until one has enough different numbers in it to be found again."""
_DISTINCT = 8
"""So many different numbers are those of one model, and of one place in it."""
_ALIKE_BY_CHANCE = 4
"""So many elements behind a shard may be like the weight by chance: in bfloat16 one of some hundred is."""
_FIRST_LOOK = 1024


class Values(Protocol):
    """Numbers of a tensor, flattened."""

    @property
    def numel(self) -> int:
        """How many there are."""

    def read(self, start: int, stop: int) -> Any:
        """Return a plain tensor [stop - start] on the CPU, in the dtype that they have."""


class TensorValues:
    """Numbers of a tensor that is in memory, on any device."""

    def __init__(self, tensor: Any) -> None:
        self._flat = tensor.detach().reshape(-1)

    @property
    def numel(self) -> int:
        """How many there are."""
        return int(self._flat.numel())

    def read(self, start: int, stop: int) -> Any:
        """Return a part of them."""
        return self._flat[start:stop].cpu()


class Marks(NamedTuple):
    """What the masters of one parameter, or of one shard of it, say."""

    differs: bool
    """Whether any of them is not the weight's own, a unit in the last place of the weight's dtype aside."""
    displaced_by: int = 0
    """How many elements further on the masters begin; 0 where they are not displaced, or are too few to tell."""
    zero_tail: int = 0
    """How many elements at the end are 0 in masters and moments, while the weight has other numbers there."""

    @property
    def shows_the_defect(self) -> bool:
        """Whether one of the two marks is there."""
        return bool(self.displaced_by or self.zero_tail)


def marks(master: Values, weight: Values, moments: Sequence[Values]) -> Marks:
    """Compare the fp32 weights of a parameter with the weight that the model has.

    Args:
        master: fp32.
        weight: bf16, fp16 or fp32, as many.
        moments: those that are saved beside it, fp32, as many each.
    """
    first = first_difference(master, weight)
    if first is None:
        return Marks(differs=False)
    return Marks(True, displacement(master, weight, first), zero_tail(master, weight, moments))


def first_difference(
    master: Values, weight: Values, start: int = 0, stop: int | None = None, ahead: int = 0
) -> int | None:
    """Return the first place at which a master is not the weight `ahead` elements further on, or None."""
    stop = weight.numel - ahead if stop is None else stop
    for block in range(start, stop, BLOCK):
        end = min(block + BLOCK, stop)
        unlike = ~_alike(master.read(block, end), weight.read(block + ahead, end + ahead))
        if bool(unlike.any()):
            return block + int(unlike.nonzero()[0])
    return None


def displacement(master: Values, weight: Values, first: int) -> int:
    """Return how many elements further on in the weight the masters lie from their beginning to their end; 0 where they do not.

    Args:
        master: fp32.
        weight: bf16, fp16 or fp32, as many.
        first: a place at which they differ; from there on a window is looked for that can be found again.
    """
    total, end = weight.numel, master.numel - _zeros_at_the_end(master)
    for at in range(first, min(first + _WINDOWS * _WINDOW, total - 2 * _WINDOW, end - _WINDOW + 1), _WINDOW):
        window = master.read(at, at + _WINDOW)
        if len(window.to(weight.read(at, at + 1).dtype).unique()) < _DISTINCT:
            continue
        found = _found(window, weight, at + 1)
        return found - at if found is not None and _is_displaced(master, weight, found - at, at + _WINDOW, end) else 0
    return _short_displacement(master, weight, end)


def _is_displaced(master: Values, weight: Values, ahead: int, seen: int, end: int) -> bool:
    """Return whether masters are the weight's own from `ahead` elements further on, in each shard that was written.

    A shard that a rank of tensor parallelism wrote ends in `ahead` elements of other parameters. Where fewer ranks load it,
    several of them lie one behind the other.

    Args:
        master: fp32.
        weight: bf16, fp16 or fp32, as many.
        ahead: how far further on.
        seen: where the window ends by which that was found.
        end: where the zeros begin in which the masters end, as those of a parameter that grew.
    """
    limit = min(end, weight.numel - ahead)
    stop = first_difference(master, weight, 0, limit, ahead)
    if stop is None or stop + ahead >= end:
        return True
    return any(
        _is_displaced_in_shards(master, weight, ahead, last, end)
        for last in range(stop, max(stop - _ALIKE_BY_CHANCE, seen - 1, 0), -1)
    )


def _is_displaced_in_shards(master: Values, weight: Values, ahead: int, stop: int, end: int) -> bool:
    """Return whether shards of `stop + ahead` elements, the last one perhaps shorter, are all displaced alike."""
    limit, shard = min(end, weight.numel - ahead), stop + ahead
    others = [(start, min(start + stop, limit)) for start in range(shard, end, shard)]
    return all(
        last - start >= _DISTINCT and first_difference(master, weight, start, last, ahead) is None
        for start, last in others
    )


def _short_displacement(master: Values, weight: Values, end: int) -> int:
    """Return the displacement of a parameter that is too short for a window, and at the end of its buffer; else 0."""
    zeros = master.numel - end
    if not zeros or not has_many_numbers(master, end):
        return 0
    return zeros if end <= weight.numel - zeros and first_difference(master, weight, 0, end, zeros) is None else 0


def zero_tail(master: Values, weight: Values, moments: Sequence[Values]) -> int:
    """Return how many elements at the end are 0 in masters and moments.

    0 where the weight has nothing but zeros there, too, or where the masters ahead of them are the weight's own.
    """
    shortest = weight.numel
    for each in (master, *moments):
        shortest = min(shortest, _zeros_at_the_end(each)) if shortest else 0  # most have none, and need no moments read
    start = weight.numel - shortest
    if has_many_numbers(weight, start) and first_difference(master, weight, 0, start) is None:
        return 0
    for block in range(start, weight.numel, BLOCK):
        if bool(weight.read(block, min(block + BLOCK, weight.numel)).any()):
            return shortest
    return 0


def has_many_numbers(values: Values, stop: int, start: int = 0) -> bool:
    """Return whether there are enough different numbers to tell a parameter of one model from that of another."""
    import torch

    found = torch.empty(0)
    width = _FIRST_LOOK
    while start < stop and len(found) < _DISTINCT:
        end = min(start + width, stop)
        found = torch.cat([found, values.read(start, end).float()]).unique()
        start, width = end, BLOCK
    return len(found) >= _DISTINCT


def _zeros_at_the_end(values: Values) -> int:
    end = values.numel
    while end:
        start = max(end - BLOCK, 0)
        others = values.read(start, end).nonzero()
        if len(others):
            return values.numel - (start + int(others[-1]) + 1)
        end = start
    return values.numel


def _found(window: Any, weight: Values, start: int) -> int | None:
    """Return the first place, from `start` on, at which the weight is like the window."""
    width = len(window)
    for block in range(start, weight.numel - width + 1, BLOCK):
        there = weight.read(block, min(block + BLOCK + width - 1, weight.numel))
        places = _alike(window[:1], there[: len(there) - width + 1]).nonzero().flatten()
        for place in range(1, width):
            places = places[_alike(window[place], there[places + place])]
            if not len(places):
                break
        else:
            return block + int(places[0])
    return None


def _alike(master: Any, weight: Any) -> Any:
    """Return where masters are those of a weight: it is the master, rounded to its dtype.

    An optimizer that keeps a weight and the bits that it lost rounds ties another way, so a unit in the last place counts
    as alike.
    """
    import torch

    rounded, kept = master.to(weight.dtype).float(), weight.float()
    alike = (rounded == kept) | (rounded.isnan() & kept.isnan())
    if weight.dtype != torch.float32:
        alike |= (rounded - kept).abs() <= torch.finfo(weight.dtype).eps * kept.abs()
    return alike
