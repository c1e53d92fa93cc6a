"""Launch parameters of the kernels of attention over chosen keys: tiles of slots, heads and channels, and rings of tiles.

The numbers were measured on an H200, and fit its shared memory and registers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import triton

SMALLEST_DIM = 16
LARGEST_DIM = 640
FEW_HEADS = 32
FEWEST_HEADS = 16
"""As many as tensor cores take at once."""
SPECIALISED_HEADS = 64
"""How many heads a program takes whose warps share out the work."""
_FEW_CHANNELS = 192
_SOME_CHANNELS = 320
"""With more, sums of all channels do not fit into the registers together with the scores."""
_WIDE_CHANNELS = 128
_SHARED = 227 * 1024 - 512
"""Bytes of shared memory that a program on Hopper may fill, less those of barriers."""
_LONGEST_RING = 4
_LEAST_SLOT_BYTES, _MOST_SLOT_BYTES = 3 << 27, 1 << 31
_SLOTS_OF_A_KEY = 32
"""Of a key, on average, whose gradients are held at a time: its sum in float32, read and written, takes as much as four slots do."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotTile:
    """How a kernel is launched: slots and heads at a time, warps, and how many tiles are loaded ahead."""

    slots: int
    warps: int
    stages: int
    heads: int = 64
    """At most: fewer where there are no more."""
    width: int = LARGEST_DIM
    """Channels of a key at most that are read as one tensor: with few heads narrow ones take fewer registers of a thread."""


FORWARD = SlotTile(slots=64, warps=8, stages=2)
FORWARD_OF_FEW_HEADS = SlotTile(slots=64, warps=4, stages=2, width=64)
"""A program waits for keys and hardly multiplies: several share a multiprocessor."""
FORWARD_OF_FEW_CHANNELS = SlotTile(slots=64, warps=4, stages=2)
"""Two programs share a multiprocessor: one takes a softmax while the other multiplies."""
FORWARD_OF_SOME_CHANNELS = SlotTile(slots=64, warps=8, stages=2, heads=128)
"""Each key is gathered once for twice as many heads."""
QUERY_SIDE = SlotTile(slots=32, warps=8, stages=2)
QUERY_SIDE_OF_FEW_HEADS = SlotTile(slots=32, warps=4, stages=2, width=64)
QUERY_SIDE_OF_FEW_CHANNELS = SlotTile(slots=64, warps=4, stages=2)
QUERY_SIDE_OF_SOME_CHANNELS = SlotTile(slots=32, warps=4, stages=1)
QUERY_SIDE_OF_SOME_CHANNELS_AND_MANY_HEADS = SlotTile(slots=64, warps=8, stages=1, heads=128)
ADD_KEYS = SlotTile(slots=64, warps=8, stages=2)
SLOT_SIDE = SlotTile(slots=64, warps=4, stages=2)
SLOT_SIDE_OF_FEW_HEADS = SlotTile(slots=64, warps=4, stages=4)
SLOT_BLOCKS = SlotTile(slots=128, warps=4, stages=2)
SUM_SLOTS = SlotTile(slots=2, warps=1, stages=3)
SUM_SLOTS_OF_FEW_CHANNELS = SlotTile(slots=16, warps=1, stages=1)
"""A program spends its time waiting for memory: the fewer warps it has, the more of them a multiprocessor waits for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """Two powers of two that hold `dim` channels: `rest` is 0 where `first` does."""

    first: int
    rest: int
    wide: bool
    """Whether values reach into the rest."""

    @property
    def channels(self) -> int:
        """How many both hold."""
        return self.first + self.rest

    @property
    def values(self) -> int:
        """How many channels the parts hold that have values in them."""
        return self.channels if self.wide else self.first


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelTiles:
    """Tiles of channels of one width, side by side; `before` is how many tiles there are before them."""

    start: int
    width: int
    tiles: int
    before: int


@dataclasses.dataclass(frozen=True, slots=True)
class SumTiles:
    """Tiles of channels that one program adds up: a power of two of one width, and one of `rest` channels, 0 for none."""

    start: int
    tiles: int
    width: int
    rest: int
    before: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """How many keys a tile of the ring in shared memory holds, and how many tiles there are."""

    slots: int
    tiles: int


@functools.cache
def parts_of(dim: int, value: int) -> Parts:
    """Cut channels so that products are small: the first part holds most of the values, and is never cut short."""
    ways = []
    for first in {_floor(dim), _floor(max(SMALLEST_DIM, value)), 1 << (max(SMALLEST_DIM, value) - 1).bit_length()}:
        if first <= dim and (rest := 0 if first == dim else max(16, triton.next_power_of_2(dim - first))) <= 512:
            wide = value > first
            ways.append(((2 * (first + rest) + (rest if wide else 0) + first), first, rest, wide))
    _, first, rest, wide = min(ways)
    return Parts(first, rest, wide)


def channel_tiles(dim: int) -> list[ChannelTiles]:
    """Return wide tiles of channels, and one for the rest."""
    wide = min(_WIDE_CHANNELS, _floor(dim))
    whole, rest = divmod(dim, wide)
    last = [ChannelTiles(whole * wide, max(16, int(triton.next_power_of_2(rest))), 1, whole)] if rest else []
    return [ChannelTiles(0, wide, whole, 0), *last]


def sum_tiles(dim: int) -> list[SumTiles]:
    """Return the tiles of `channel_tiles` as programs add them up: most of them at once, so that a slot is found once for all."""
    wide, *last = channel_tiles(dim)
    count = _floor(wide.tiles)
    # Of at most five wide tiles one may be left.
    left = [ChannelTiles(count * wide.width, wide.width, 1, count)] * (wide.tiles - count) + last
    first = SumTiles(0, count, wide.width, left[0].width if left else 0, 0)
    return [first, *(SumTiles(each.start, 1, each.width, 0, each.before) for each in left[1:])]


def slot_bytes(keys: int, dim: int) -> int:
    """Return the limit in bytes of gradients of slots of some rows, so large that sums of all keys are read and written few times."""
    return max(_LEAST_SLOT_BYTES, min(_MOST_SLOT_BYTES, _SLOTS_OF_A_KEY * keys * dim * 2))


def forward_tile(parts: Parts, heads: int) -> SlotTile:
    """Return how the forward pass is launched where its warps do not share out the work."""
    if heads > FEW_HEADS and parts.channels <= _FEW_CHANNELS:
        return FORWARD_OF_FEW_CHANNELS
    if heads > SPECIALISED_HEADS and parts.channels <= _SOME_CHANNELS and not parts.wide:
        return FORWARD_OF_SOME_CHANNELS
    return FORWARD if heads > FEWEST_HEADS else FORWARD_OF_FEW_HEADS


def query_side_tile(parts: Parts, heads: int) -> SlotTile:
    """Return how the first part of the backward pass is launched where its warps do not share out the work."""
    if heads > FEW_HEADS and parts.channels <= _FEW_CHANNELS:
        return QUERY_SIDE_OF_FEW_CHANNELS
    if heads > FEW_HEADS and parts.channels <= _SOME_CHANNELS and not parts.wide:
        many = heads > SPECIALISED_HEADS
        return QUERY_SIDE_OF_SOME_CHANNELS_AND_MANY_HEADS if many else QUERY_SIDE_OF_SOME_CHANNELS
    return QUERY_SIDE if heads > FEWEST_HEADS else QUERY_SIDE_OF_FEW_HEADS


def forward_ring(parts: Parts, heads: int) -> Ring | None:
    """Return the ring of the forward pass whose warps share out the work, None where another way is quicker or the only one."""
    if forward_tile(parts, heads) is not FORWARD or not _can_share_work(parts, heads):
        return None
    return _largest_ring(parts, lambda slots: 2 * SPECIALISED_HEADS * (parts.first + 2 * slots) + 512)


def score_ring(parts: Parts, heads: int) -> Ring | None:
    """Return the ring of the backward pass whose warps share out the work, None where another way is quicker or the only one."""
    if query_side_tile(parts, heads) is not QUERY_SIDE or not _can_share_work(parts, heads):
        return None
    return _largest_ring(parts, lambda slots: 4 * SPECIALISED_HEADS * 2 * slots)


def _largest_ring(parts: Parts, beside: Callable[[int], int]) -> Ring | None:
    """Return the widest ring of two tiles or more that fits; `beside` returns the bytes that a program needs besides, by the number of slots."""
    channels = parts.first + max(16, parts.rest)
    for slots in (64, 32):
        if (tiles := (_SHARED - beside(slots)) // (2 * slots * channels)) >= 2:
            return Ring(slots, min(tiles, _LONGEST_RING))
    return None


def _can_share_work(parts: Parts, heads: int) -> bool:
    """Return whether the kernels in `specialised_code` take these parts."""
    return heads > FEW_HEADS and parts.first >= 128 and not parts.wide


def slots_of(tile: SlotTile, block: int, parts: Parts, held: int, *, scaled: bool) -> int:
    """Return how many slots of a tile fit into shared memory, ahead of time too.

    Args:
        tile: how the kernel is launched.
        block: heads of a program.
        parts: channels of a key.
        held: channels of the left operands that lie next to them.
        scaled: whether keys are FP8 numbers, which are scaled on the way.
    """
    slots = tile.slots
    # FP8 numbers that come ahead take half as much, but once scaled there are up to two more tiles of them.
    ahead = tile.stages + (1 if scaled else 0)
    while slots > 16 and 2 * (held * block + parts.channels * ahead * slots + 2 * block * slots) > _SHARED:
        slots //= 2
    return slots


def head_block(heads: int, tile: SlotTile) -> int:
    """Return how many heads a program takes."""
    return max(16, min(tile.heads, int(triton.next_power_of_2(heads))))


def _floor(number: int) -> int:
    return 1 << (number.bit_length() - 1)
