"""Division of the classes of a shard into blocks of logits: one, several, in panels, or on two paths.

The choice depends on shapes, dtypes and the memory setting, never on the values of tensors, so a captured graph computes
the same as a call outside of it.
"""

from __future__ import annotations

import functools

import torch

from megacpp_overlays.kernels.linear_cross_entropy.memory import Masked, Memory
from megacpp_overlays.kernels.linear_cross_entropy.shard import Shard
from megacpp_overlays.kernels.linear_cross_entropy.two_paths import TwoPaths
from megacpp_overlays.kernels.masked_products.panels import Panels
from megacpp_overlays.kernels.masked_products.products import TileWave, available, wave_of
from megacpp_overlays.kernels.masked_products.token_selection import Selection

_NUMBERS_OF_A_SELECTED_TOKEN = 64
"""Bytes in addition to its hidden states: its place, its label, and the coefficients of the gradient of its logits."""
_NARROWED = 0.75
"""The least share of the widest block that is given up for fuller waves."""
_LOGITS, _SUM_BYTES, _OPERATIONS_OF_A_BYTE = 2, 8, 200
"""Of a block: how often its logits are computed, the bytes to read and write a number of the hidden states' gradient, and
the operations of a product that a device does in the time of a byte: 700 TFLOP/s and 3.5 TB/s.
"""


def is_one_block(hidden: torch.Tensor, shard: Shard, memory: Memory) -> bool:
    """Return whether all classes share one block of logits, which the forward pass leaves to the backward pass."""
    return memory.fits(shard.bytes_of_a_class(hidden), shard.classes, _beside_one_block(hidden, shard, memory))


def step_of(hidden: torch.Tensor, shard: Shard, memory: Memory) -> int:
    """Return the classes of a block."""
    widest = memory.classes_with(
        shard.bytes_of_a_class(hidden),
        _beside(hidden, shard, memory),
        shard.classes,
        taken_by_one=_beside_one_block(hidden, shard, memory),
    )
    return _with_full_waves(widest, hidden, shard, memory)


@functools.lru_cache(maxsize=64)
def with_full_waves(widest: int, tokens: int, channels: int, wave: TileWave) -> int:
    """Return the classes of a block, at most so many, with which products leave least of a device idle.

    The tiles of a product are computed a wave at a time, and where the last wave does not fill the device, or half of it in
    halves of tiles, it waits. As panels of fewer tokens fill the same memory, they have as many tiles.

    Args:
        widest: classes of the widest block.
        tokens: rows of a block.
        channels: of the hidden states.
        wave: the tiles that the device computes at one time.
    """
    least = max(wave.columns, int(widest * _NARROWED))
    widths = range(widest // wave.columns * wave.columns, least - 1, -wave.columns)

    def cost_of_a_class(width: int) -> float:
        # The operations that the device does meanwhile, those of idle multiprocessors too, for each channel and token. The cost
        # of the hidden states' gradient for a class is the same in every block, except for its sums.
        logits = _LOGITS * wave.waves(tokens, width) / tokens
        of_weight = wave.waves(width, channels) / channels
        products = 2 * wave.rows * wave.columns * wave.tiles * (logits + of_weight)
        return (products + _OPERATIONS_OF_A_BYTE * _SUM_BYTES) / width

    return min(widths, key=cost_of_a_class, default=widest)


def _with_full_waves(widest: int, hidden: torch.Tensor, shard: Shard, memory: Memory) -> int:
    """Return the same for a block of this shard, where its products are not cuBLAS's and its width was not chosen."""
    if widest >= shard.classes or memory.block_classes or not memory.may_skip:
        return widest
    if not available(hidden.dtype, hidden, shard.weight):
        return widest
    wave = wave_of(hidden.device)
    return widest if wave is None else with_full_waves(widest, *hidden.shape, wave)


def blocks(classes: int, step: int) -> list[slice]:
    """Return the rows of each block. If one has to be narrower it is the first: the last one may be kept."""
    return [slice(max(0, stop - step), stop) for stop in range(classes, 0, -step)][::-1]


def panels_of(
    hidden: torch.Tensor, shard: Shard, memory: Memory, step: int, classes: int, selection: Selection | None
) -> Panels | None:
    """Return how the first classes of a shard share the memory of a block; None where blocks come one by one.

    That is where all tokens are computed, and where a product wants a rounded copy of a block's weight.
    """
    if selection is None or shard.weight.dtype != hidden.dtype:
        return None
    return Panels.cut(classes, step, hidden.shape[0], selection.count, memory.panels)


def two_paths(hidden: torch.Tensor, shard: Shard, memory: Memory, selection: Selection | None) -> TwoPaths | None:
    """Plan a dense and a compact path for one pass over a shard; return None if one path serves every selection.

    One path serves if the copy of the hidden states makes no block narrower, if there is no copy, and with `auto`,
    which looks at masks first. With several ranks there is one path, too: each sends its gradient while its last product
    runs, and on a path that the device does not run there is no product.
    """
    if selection is None or memory.masked is not Masked.SKIP or not shard.is_whole:
        return None
    if shard.weight.dtype != hidden.dtype or is_one_block(hidden, shard, memory) or not copies(hidden, shard, memory):
        return None
    compact_width = step_of(hidden, shard, memory)
    beside = _of_sums(hidden) + _NUMBERS_OF_A_SELECTED_TOKEN * hidden.shape[0]
    dense_width = memory.classes_with(shard.bytes_of_a_class(hidden), beside, shard.classes)
    dense_width = _with_full_waves(dense_width, hidden, shard, memory)
    if dense_width <= compact_width:
        return None
    return TwoPaths.cut(selection, shard.classes, dense_width, compact_width, shard.logits_dtype, memory.panels)


def copies(hidden: torch.Tensor, shard: Shard, memory: Memory) -> bool:
    """Return whether hidden states of selected tokens are copied, which makes their products simpler."""
    beside = _of_sums(hidden) + hidden.nbytes + _NUMBERS_OF_A_SELECTED_TOKEN * hidden.shape[0]
    taken_by_one = 0 if shard.is_whole else beside
    if memory.fits(shard.bytes_of_a_class(hidden), shard.classes, taken_by_one):
        return True
    return memory.leaves_room(beside)


def chosen_rows(
    hidden: torch.Tensor, selection: Selection, shard: Shard, memory: Memory
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return hidden states, and the order in which products take their rows; None if the selected ones come first."""
    if copies(hidden, shard, memory):
        return selection.first(hidden), None
    return hidden, selection.order


def _beside_one_block(hidden: torch.Tensor, shard: Shard, memory: Memory) -> int:
    """Return the bytes in addition to one block. Only sums between ranks need them: one rank writes its result directly."""
    return 0 if shard.is_whole else _beside(hidden, shard, memory)


def _beside(hidden: torch.Tensor, shard: Shard, memory: Memory) -> int:
    """Return the bytes in addition to several blocks: the hidden states' gradient in float32 and a copy of selected tokens.

    The finished gradient is only allocated after the last block is freed, and its memory counts as a result.
    """
    beside = _of_sums(hidden)
    if memory.may_skip and available(hidden.dtype, hidden, shard.weight):
        beside += _NUMBERS_OF_A_SELECTED_TOKEN * hidden.shape[0]
        beside += hidden.nbytes if copies(hidden, shard, memory) else 0
    return int(beside)


def _of_sums(hidden: torch.Tensor) -> int:
    return int(hidden.numel() * max(4 - hidden.element_size(), 0))
