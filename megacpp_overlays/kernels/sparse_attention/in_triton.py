"""Attention over chosen keys on tensor cores: bfloat16 or float16 in, float32 sums and softmax.

Forward: a program has a row (a query of a batch element) and some heads, gathers keys by tiles of slots, and keeps a running
softmax. For a backward pass it also keeps the rounding error of the output, 16 bits of each number. Backward: programs compute
weights and gradients of scores again and keep both, rounded to the dtype of the inputs, for a part of the rows; the gradient of
the query is added up from them. Then each slot gets the gradient of its key from all heads at once, as float16 numbers times a
power of two of its own. The contributions of the slots of a key are added up in slot order, which a sort finds, so a rerun gives
the same bits. The size of all buffers has a bound that does not depend on the number of queries.

Where they were measured (see `measured`), and for CPU tensors in the Triton interpreter.
"""

from __future__ import annotations

import dataclasses
import importlib
from types import ModuleType
from typing import Any

import torch
import triton
from packaging.version import Version
from triton.tools.tensor_descriptor import TensorDescriptor

if Version(triton.__version__) < Version("3.6"):
    raise ImportError(f"triton {triton.__version__} is older than 3.6, the oldest that was tried")

from megacpp_overlays.kernels import measured
from megacpp_overlays.kernels.devices import on_device_of
from megacpp_overlays.kernels.sparse_attention import device_code, quantized_keys, slot_order, tiles

_KEPT_BYTES = 1 << 28
"""Largest size of the weights and gradients of scores of some rows."""
_READS_WORTH_OPENING = 4
"""Of each key, on average: to scale it for each query anew took up to three times as long on an H200."""


@dataclasses.dataclass(frozen=True, slots=True)
class KeyScales:
    """Scales of keys as kernels take them."""

    held: torch.Tensor
    """Float32 scales; any tensor where there are none."""
    strides: tuple[int, int, int]
    """From a key, a batch element and a block of channels to the next one."""
    blocks: int
    """How many scales a key has; 0 where its numbers are taken as they are."""


def takes(dtype: torch.dtype, dim: int, device: torch.device) -> bool:
    """Return whether these kernels run for inputs of a dtype and a number of channels on a device."""
    if dtype not in {torch.bfloat16, torch.float16} or not tiles.SMALLEST_DIM <= dim <= tiles.LARGEST_DIM:
        return False
    if device.type == "cpu":
        return bool(device_code.INTERPRETED)
    return not measured.declines(device, "sparse attention", "plain PyTorch computes it in blocks")


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    value: int,
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
    key_scales: torch.Tensor | None = None,
    learns: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, (queries, batch, heads, value), and the log-sum-exp, (queries, batch, heads): see `function.attend`.

    With `key_scales`, (keys, batch, blocks), key holds the bits of FP8 numbers. The third result is the rounding error of the
    output, of its shape, int16; it is empty unless `learns`, that is, unless a backward pass uses it.
    """
    query, key, indices, bias = _rows(query), _rows(key), _rows(indices), None if bias is None else _rows(bias)
    queries, batch, heads, dim = query.shape
    out = torch.empty((queries, batch, heads, value), dtype=query.dtype, device=query.device)
    lse = torch.empty((queries, batch, heads), dtype=torch.float32, device=query.device)
    remainder = torch.empty(out.shape if learns else (0,), dtype=torch.int16, device=query.device)
    if lse.numel() == 0:
        return out, lse, remainder
    parts = tiles.parts_of(dim, value)
    tile = tiles.forward_tile(parts, heads)
    block = tiles.head_block(heads, tile)
    sizes = (batch, heads, key.size(0), indices.size(2), dim, value, scale * device_code.LOG2_E)
    ring = tiles.forward_ring(parts, heads) if bias is None and query.is_cuda else None
    with on_device_of(query):
        key, scales = _as_read(query, key, key_scales, indices, ring)
        strides = (*query.stride()[:3], *key.stride()[:2], *indices.stride()[:2])
        counts = _counts(query, key, indices)
        if ring is not None:
            _specialised().attend_rows[(queries * batch * triton.cdiv(heads, tiles.SPECIALISED_HEADS),)](
                *(query, key, indices, counts, lse if sink is None else sink, out, remainder, lse, *sizes, *strides),
                FIRST=parts.first,
                REST=parts.rest,
                SLOTS=ring.slots,
                RING=ring.tiles,
                SINK=sink is not None,
                POSITIVE=scale > 0,
                KEEPS=learns,
                num_warps=4,
            )
            return out, lse, remainder
        device_code.attend_rows[(queries * batch * triton.cdiv(heads, block),)](
            *(query, key, indices, counts, scales.held, indices if bias is None else bias),
            *(lse if sink is None else sink, out, remainder, lse, *sizes),
            *(*strides, *scales.strides, *(indices if bias is None else bias).stride()[:2]),
            FIRST=parts.first,
            WIDTH=min(tile.width, parts.first),
            REST=parts.rest,
            WIDE=parts.wide,
            HEADS=block,
            SLOTS=tiles.slots_of(tile, block, parts, parts.channels, scaled=scales.blocks > 0),
            SCALES=scales.blocks,
            BIAS=bias is not None,
            SINK=sink is not None,
            KEEPS=learns,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
    return out, lse, remainder


def backward(
    grad: torch.Tensor,
    of_lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    remainder: torch.Tensor,
    lse: torch.Tensor,
    key_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query and key, and (queries, batch, heads): output times gradient, less that of the lse.

    That of quantized keys is of the numbers that they stand for, in the dtype of query. Without a remainder, which is then
    empty, output times gradient is taken of the rounded output.
    """
    query, key, indices, bias = _rows(query), _rows(key), _rows(indices), None if bias is None else _rows(bias)
    grad, of_lse = _rows(grad), of_lse.contiguous()
    queries, batch, heads, dim = query.shape
    keys, slots, value = key.size(0), indices.size(2), grad.size(3)
    of_q = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    of_k = torch.zeros((keys * batch, dim), dtype=torch.float32, device=query.device)
    mean = torch.empty((queries, batch, heads), dtype=torch.float32, device=query.device)
    rows = queries * batch
    if 0 in {rows * heads, slots}:
        return of_q.zero_(), of_k.view(key.shape).to(query.dtype), mean
    slot_rows = max(1, min(rows, tiles.slot_bytes(keys * batch, dim) // (slots * dim * 2)))
    kept_rows = min(rows, slot_rows * max(1, _KEPT_BYTES // (slots * heads * 4 * slot_rows)))
    weights, of_scores = (
        torch.empty((kept_rows, heads, slots), dtype=query.dtype, device=query.device) for _ in range(2)
    )
    channel_tiles = tiles.channel_tiles(dim)
    of_slots = torch.empty((slot_rows, slots, dim), dtype=torch.float16, device=query.device)
    units = torch.empty(
        (slot_rows, slots, sum(each.tiles for each in channel_tiles)), dtype=torch.float32, device=query.device
    )
    ring = tiles.score_ring(tiles.parts_of(dim, value), heads) if bias is None and query.is_cuda else None
    with on_device_of(query):
        key, scales = _as_read(query, key, key_scales, indices, ring)
        counts = _counts(query, key, indices)
        device_code.mean_gradients[(rows * triton.cdiv(heads, 16),)](
            *(out, remainder, grad, of_lse, mean, heads, value, batch, *grad.stride()[:3]),
            HEADS=16,
            VALUE=64,
            KEPT=remainder.numel() > 0,
        )
        due = of_lse if sink is None else torch.addcmul(of_lse, mean, torch.exp(sink.float() - lse))
        whole = all(_are_whole(each, slots) for each in (query, grad))
        of_rows = [each.squeeze(1) if batch == 1 else each.flatten(0, 1) for each in (query, grad)] if whole else []
        for start in range(0, rows, kept_rows):
            some = min(kept_rows, rows - start)
            _query_side(
                *(query, key, scales, ring, indices, counts, scale, bias, grad, lse, mean, due),
                *(of_q, weights, of_scores, start, some),
            )
            held = [each[start : start + some].contiguous() for each in of_rows]
            for first in range(start, start + some, slot_rows):
                fewer = min(slot_rows, start + some - first)
                kept = (weights, of_scores, counts, of_slots, units, scale, first, fewer, start)
                if heads <= tiles.FEWEST_HEADS:
                    _slot_side_of_few_heads(query, grad, *kept)
                else:
                    for tile in channel_tiles:
                        _slot_side(query, grad, held, *kept, tile)
                order, ends = slot_order.sorted_slots(indices, keys, first, fewer)
                sum_slots(of_slots, units, order, ends, of_k, tiles.sum_tiles(dim), first == 0)
    return of_q, of_k.view(key.shape).to(query.dtype), mean


def sum_slots(
    of_slots: torch.Tensor,
    units: torch.Tensor,
    order: torch.Tensor,
    ends: torch.Tensor,
    of_k: torch.Tensor,
    parts: list[tiles.SumTiles],
    first_time: bool,
) -> None:
    """Add the contributions of slots to the gradients of their keys; the first time, write them.

    Args:
        of_slots: (rows, slots, dim), float16.
        units: (rows, slots, tiles of channels), float32: the factor of the numbers of a tile.
        order: slots in the order of their keys, see `slot_order`.
        ends: where those of each key start.
        of_k: (keys, dim), float32.
        parts: the tiles of channels, as `units` has them.
        first_time: whether nothing is in `of_k`.
    """
    keys, dim = of_k.shape
    for each in parts:
        way = tiles.SUM_SLOTS if each.tiles > 1 else tiles.SUM_SLOTS_OF_FEW_CHANNELS
        device_code.sum_slots[(keys,)](
            *(of_slots, units, order, ends, of_k, dim, each.start, each.before, units.size(2)),
            FIRST_TIME=first_time,
            SLOTS=way.slots,
            TILES=each.tiles,
            WIDTH=each.width,
            REST=each.rest,
            STAGES=way.stages,
            num_warps=way.warps,
        )


def _as_read(
    query: torch.Tensor,
    key: torch.Tensor,
    key_scales: torch.Tensor | None,
    indices: torch.Tensor,
    ring: tiles.Ring | None,
) -> tuple[torch.Tensor, KeyScales]:
    """Return keys and scales as the kernels of a pass read them.

    Quantized keys are read as they are where few queries choose among many keys. They are opened once for this pass, (keys,
    batch, 1, dim) in the dtype of query, where each key is read many times, and where the warps of a program share out the work:
    there the copy engine puts keys into shared memory and the matrix unit reads them from there, so no step could scale them.
    """
    if key_scales is None:
        return key, KeyScales(query, (0, 0, 0), 0)
    reads = indices.size(1) * indices.size(2)
    if ring is not None or reads >= _READS_WORTH_OPENING * key.size(0):
        return quantized_keys.opened(key, key_scales.unsqueeze(2), query.dtype), KeyScales(query, (0, 0, 0), 0)
    return quantized_keys.as_float8(key), KeyScales(key_scales, key_scales.stride(), key_scales.size(2))


def _slot_side(
    query: torch.Tensor,
    grad: torch.Tensor,
    held: list[torch.Tensor],
    weights: torch.Tensor,
    of_scores: torch.Tensor,
    counts: torch.Tensor,
    of_slots: torch.Tensor,
    units: torch.Tensor,
    scale: float,
    start: int,
    rows: int,
    kept_start: int,
    tile: tiles.ChannelTiles,
) -> None:
    """Write the contributions of the slots of some rows to the gradients of their keys.

    `held` is query and gradient from `kept_start` on, (rows, heads, channels), contiguous, where tiles of them are whole.
    """
    _, batch, heads, dim = query.shape
    slots, value = of_slots.size(1), grad.size(3)
    # The copy engine brings tiles of queries and gradients, and stores those of slots.
    blocks = len(held) > 0 and all(each.data_ptr() % 16 == 0 for each in held)
    way = tiles.SLOT_BLOCKS if blocks else tiles.SLOT_SIDE
    described: list[Any] = [query, grad, weights, of_scores, of_slots]
    if blocks:
        described = [
            *(TensorDescriptor.from_tensor(each.flatten(0, 1), [64, tile.width]) for each in held),
            *(TensorDescriptor.from_tensor(each.view(-1, slots), [64, way.slots]) for each in (weights, of_scores)),
            TensorDescriptor.from_tensor(of_slots.view(-1, dim), [way.slots, tile.width]),
        ]
    device_code.slot_side[(rows * triton.cdiv(slots, way.slots) * tile.tiles,)](
        *(*described[:4], counts, described[4], units, start, kept_start),
        *(batch, heads, slots, dim, value, scale, tile.start, tile.before, units.size(2), tile.tiles),
        *(*query.stride()[:3], *grad.stride()[:3]),
        SLOTS=way.slots,
        CHANNELS=tile.width,
        HEADS=tiles.head_block(heads, way),
        VALUES=tile.start < value,
        BLOCKS=blocks,
        STAGES=way.stages,
        num_warps=way.warps,
    )


def _slot_side_of_few_heads(
    query: torch.Tensor,
    grad: torch.Tensor,
    weights: torch.Tensor,
    of_scores: torch.Tensor,
    counts: torch.Tensor,
    of_slots: torch.Tensor,
    units: torch.Tensor,
    scale: float,
    start: int,
    rows: int,
    kept_start: int,
) -> None:
    """Write the contributions of the slots of some rows to the gradients of their keys, where one tile has all heads."""
    _, batch, heads, dim = query.shape
    slots, way = of_slots.size(1), tiles.SLOT_SIDE_OF_FEW_HEADS
    wide, *last = tiles.channel_tiles(dim)
    device_code.slot_side_of_few_heads[(rows * triton.cdiv(slots, way.slots),)](
        *(query, grad, weights, of_scores, counts, of_slots, units, start, kept_start),
        *(batch, heads, slots, dim, grad.size(3), scale, *query.stride()[:3], *grad.stride()[:3]),
        SLOTS=way.slots,
        TILES=wide.tiles,
        WIDTH=wide.width,
        REST=last[0].width if last else 0,
        HEADS=tiles.FEWEST_HEADS,
        STAGES=way.stages,
        num_warps=way.warps,
    )


def _are_whole(tensor: torch.Tensor, slots: int) -> bool:
    """Return whether tiles of heads and slots of (queries, batch, heads, channels) are whole."""
    return tensor.size(2) % 64 == 0 and slots % tiles.SLOT_BLOCKS.slots == 0 and tensor.size(3) % 8 == 0


def _query_side(
    query: torch.Tensor,
    key: torch.Tensor,
    scales: KeyScales,
    ring: tiles.Ring | None,
    indices: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None,
    grad: torch.Tensor,
    lse: torch.Tensor,
    mean: torch.Tensor,
    due: torch.Tensor,
    of_q: torch.Tensor,
    weights: torch.Tensor,
    of_scores: torch.Tensor,
    start: int,
    rows: int,
) -> None:
    """Write the gradient of the query of some rows; keep weights and gradients of scores of these rows."""
    _, batch, heads, dim = query.shape
    value = grad.size(3)
    parts = tiles.parts_of(dim, value)
    sizes = (start, batch, heads, key.size(0), indices.size(2), dim, value, scale)
    strides = (*query.stride()[:3], *key.stride()[:2], *indices.stride()[:2])
    if ring is not None:
        _specialised().score_side[(rows * triton.cdiv(heads, tiles.SPECIALISED_HEADS),)](
            *(
                query,
                key,
                indices,
                counts,
                grad,
                lse,
                mean,
                due,
                weights,
                of_scores,
                *sizes[:-1],
                scale * device_code.LOG2_E,
            ),
            *(*strides, *grad.stride()[:3]),
            FIRST=parts.first,
            REST=parts.rest,
            SLOTS=ring.slots,
            RING=ring.tiles,
            num_warps=4,
        )
        block = tiles.head_block(heads, tiles.ADD_KEYS)
        device_code.add_keys[(rows * triton.cdiv(heads, block),)](
            *(key, indices, counts, of_scores, of_q, start, batch, heads, key.size(0), indices.size(2), dim, scale),
            *(*key.stride()[:2], *indices.stride()[:2]),
            FIRST=parts.first,
            REST=parts.rest,
            HEADS=block,
            SLOTS=tiles.ADD_KEYS.slots,
            STAGES=tiles.ADD_KEYS.stages,
            num_warps=tiles.ADD_KEYS.warps,
        )
        return
    tile = tiles.query_side_tile(parts, heads)
    block = tiles.head_block(heads, tile)
    device_code.query_side[(rows * triton.cdiv(heads, block),)](
        *(query, key, indices, counts, scales.held, indices if bias is None else bias, grad, lse, mean, due),
        *(of_q, weights, of_scores, *sizes, *strides, *scales.strides),
        *(*(indices if bias is None else bias).stride()[:2], *grad.stride()[:3]),
        FIRST=parts.first,
        WIDTH=min(tile.width, parts.first),
        REST=parts.rest,
        WIDE=parts.wide,
        HEADS=block,
        SLOTS=tiles.slots_of(tile, block, parts, parts.channels + parts.values, scaled=scales.blocks > 0),
        SCALES=scales.blocks,
        BIAS=bias is not None,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )


def _specialised() -> ModuleType:
    """Return the module of the kernels in Gluon: imported here alone, because Gluon is an experiment of Triton's."""
    return importlib.import_module("megacpp_overlays.kernels.sparse_attention.specialised_code")


def _counts(query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    queries, batch = query.shape[:2]
    counts = torch.empty((queries * batch,), dtype=torch.int32, device=query.device)
    device_code.count_slots[(queries * batch,)](
        *(indices, counts, batch, key.size(0), indices.size(2), *indices.stride()[:2]), SLOTS=1024
    )
    return counts


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose last axis has unit stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
