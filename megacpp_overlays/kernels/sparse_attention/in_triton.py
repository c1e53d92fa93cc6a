"""Attention over chosen keys on tensor cores: bfloat16 or float16 in, float32 sums and softmax.

Forward: a program has a row (a query of a batch element) and some heads, gathers keys by tiles of slots, and keeps a running
softmax. Backward: the same programs compute weights and gradients of scores again, add up the gradient of the query, and
keep both, rounded to the dtype of the inputs, for a part of the rows. Then each slot gets the gradient of its key, float32,
from all heads at once, and the slots that hold a key are added up in their order, which a sort finds. So a rerun gives the
same bits. Both buffers have a bound, whatever the number of queries.

NVIDIA devices of capability 9 with Triton 3.6 or newer, and CPU tensors in the Triton interpreter.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
from packaging.version import Version

if Version(triton.__version__) < Version("3.6"):
    raise ImportError(f"triton {triton.__version__} is older than 3.6, the oldest that was tried")

from megacpp_overlays.kernels.devices import on_device_of
from megacpp_overlays.kernels.sparse_attention import device_code

_LARGEST_DIM = 640
_SMALLEST_DIM = 16
_KEPT_BYTES = 1 << 30
"""What weights and gradients of scores of some rows may take."""
_SLOT_BYTES = 1 << 30
"""What gradients of the slots of some rows may take."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a kernel is launched: slots at a time, warps, and how many tiles are loaded ahead."""

    slots: int
    warps: int
    stages: int


FORWARD = Tile(slots=64, warps=8, stages=2)
QUERY_SIDE = Tile(slots=32, warps=8, stages=2)
SLOT_SIDE = Tile(slots=128, warps=8, stages=3)


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """Two powers of two that hold `dim` channels: `rest` is 0 where `first` does."""

    first: int
    rest: int
    wide: bool
    """Whether values reach into the rest."""


def takes(dtype: torch.dtype, dim: int, device: torch.device) -> bool:
    """Return whether these kernels run for inputs of a dtype and a number of channels on a device."""
    if dtype not in {torch.bfloat16, torch.float16} or not _SMALLEST_DIM <= dim <= _LARGEST_DIM:
        return False
    if device.type == "cpu":
        return bool(device_code.INTERPRETED)
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return bool(torch.cuda.get_device_capability(device)[0] == 9)


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    value: int,
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, (queries, batch, heads, value), and the log-sum-exp, (queries, batch, heads): see `function.attend`."""
    query, key, indices, bias = _rows(query), _rows(key), _rows(indices), None if bias is None else _rows(bias)
    queries, batch, heads, dim = query.shape
    out = torch.empty((queries, batch, heads, value), dtype=query.dtype, device=query.device)
    lse = torch.empty((queries, batch, heads), dtype=torch.float32, device=query.device)
    if lse.numel() == 0:
        return out, lse
    parts, block = _parts(dim, value), _head_block(heads)
    with on_device_of(query):
        counts = _counts(query, key, indices)
        device_code.attend_rows[(queries * batch * triton.cdiv(heads, block),)](
            *(query, key, indices, counts, indices if bias is None else bias, lse if sink is None else sink, out, lse),
            *(batch, heads, key.size(0), indices.size(2), dim, value, scale * device_code.LOG2_E),
            *(*query.stride()[:3], *key.stride()[:2], *indices.stride()[:2]),
            *(indices if bias is None else bias).stride()[:2],
            FIRST=parts.first,
            REST=parts.rest,
            WIDE=parts.wide,
            HEADS=block,
            SLOTS=FORWARD.slots,
            BIAS=bias is not None,
            SINK=sink is not None,
            STAGES=FORWARD.stages,
            num_warps=FORWARD.warps,
        )
    return out, lse


def backward(
    grad: torch.Tensor,
    of_lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query and key, and (queries, batch, heads): output times gradient, less that of the lse."""
    query, key, indices, bias = _rows(query), _rows(key), _rows(indices), None if bias is None else _rows(bias)
    grad, of_lse = _rows(grad), of_lse.contiguous()
    queries, batch, heads, dim = query.shape
    keys, slots, value = key.size(0), indices.size(2), grad.size(3)
    of_q = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    of_k = torch.zeros((keys * batch, dim), dtype=torch.float32, device=query.device)
    mean = torch.empty((queries, batch, heads), dtype=torch.float32, device=query.device)
    rows = queries * batch
    if 0 in {rows * heads, keys, slots}:
        return of_q.zero_(), of_k.view(key.shape).to(key.dtype), mean
    parts, block = _parts(dim, value), _head_block(heads)
    blocks = triton.cdiv(heads, block)
    slot_rows = max(1, min(rows, _SLOT_BYTES // (slots * dim * 4)))
    kept_rows = min(rows, slot_rows * max(1, _KEPT_BYTES // (slots * heads * 4 * slot_rows)))
    kept = torch.empty((2, kept_rows, slots, heads), dtype=query.dtype, device=query.device)
    of_slots = torch.empty((slot_rows, slots, dim), dtype=torch.float32, device=query.device)
    with on_device_of(query):
        counts = _counts(query, key, indices)
        device_code.mean_gradients[(rows * triton.cdiv(heads, 16),)](
            *(out, grad, of_lse, mean, heads, value, batch, *grad.stride()[:3]), HEADS=16, VALUE=64
        )
        places = _places(indices, keys)
        for start in range(0, rows, kept_rows):
            some = min(kept_rows, rows - start)
            device_code.query_side[(some * blocks,)](
                *(query, key, indices, counts, indices if bias is None else bias, grad, lse, mean, of_q, *kept),
                *(start, batch, heads, keys, slots, dim, value, scale),
                *(*query.stride()[:3], *key.stride()[:2], *indices.stride()[:2]),
                *(*(indices if bias is None else bias).stride()[:2], *grad.stride()[:3]),
                FIRST=parts.first,
                REST=parts.rest,
                WIDE=parts.wide,
                HEADS=block,
                SLOTS=QUERY_SIDE.slots,
                BIAS=bias is not None,
                STAGES=QUERY_SIDE.stages,
                num_warps=QUERY_SIDE.warps,
            )
            for first in range(start, start + some, slot_rows):
                fewer = min(slot_rows, start + some - first)
                _slot_side(query, grad, kept, counts, indices, of_slots, first, fewer, start, keys, scale, atomic=False)
                order, ends = _order(places[first : first + fewer], keys * batch)
                device_code.sum_slots[(keys * batch, triton.cdiv(dim, 256))](
                    *(of_slots, order, ends, of_k, dim), FIRST_TIME=first == 0, SLOTS=16, CHANNELS=256
                )
    return of_q, of_k.view(key.shape).to(key.dtype), mean


def _slot_side(
    query: torch.Tensor,
    grad: torch.Tensor,
    kept: torch.Tensor,
    counts: torch.Tensor,
    indices: torch.Tensor,
    of_slots: torch.Tensor,
    first: int,
    rows: int,
    kept_from: int,
    keys: int,
    scale: float,
    atomic: bool,
) -> None:
    _, batch, heads, dim = query.shape
    slots, value = indices.size(2), grad.size(3)
    for start, width, tiles in _channel_tiles(dim):
        device_code.slot_side[(rows, tiles, triton.cdiv(slots, SLOT_SIDE.slots))](
            *(query, grad, kept[0], kept[1], counts, indices, of_slots),
            *(first, batch, heads, keys, slots, dim, value, scale, start, kept_from),
            *(*query.stride()[:3], *grad.stride()[:3], *indices.stride()[:2]),
            SLOTS=SLOT_SIDE.slots,
            CHANNELS=width,
            HEADS=max(16, min(64, triton.next_power_of_2(heads))),
            VALUES=start < value,
            ATOMIC=atomic,
            STAGES=SLOT_SIDE.stages,
            num_warps=SLOT_SIDE.warps,
        )


def _channel_tiles(dim: int) -> list[tuple[int, int, int]]:
    """Return where channels start, how wide their tiles are, and how many there are: wide ones, and one for the rest."""
    wide = 256 if dim >= 256 else triton.next_power_of_2(dim + 1) // 2
    whole = dim // wide
    rest = dim - whole * wide
    last = [(whole * wide, max(16, triton.next_power_of_2(rest)), 1)] if rest else []
    return [(0, wide, whole), *last]


def _counts(query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    queries, batch = query.shape[:2]
    counts = torch.empty((queries * batch,), dtype=torch.int32, device=query.device)
    device_code.count_slots[(queries * batch,)](
        *(indices, counts, queries, batch, key.size(0), indices.size(2), *indices.stride()[:2]), SLOTS=1024
    )
    return counts


def _places(indices: torch.Tensor, keys: int) -> torch.Tensor:
    """Return (rows, slots): which row of the keys, (keys * batch), a slot holds, and keys * batch for none."""
    batch = indices.size(0)
    elements = torch.arange(batch, device=indices.device)[:, None, None]
    chosen = (indices >= 0) & (indices < keys)
    places = torch.where(chosen, indices * batch + elements, keys * batch)
    if keys * batch < 1 << 16:  # a sort of half as many bits
        places = (places - (1 << 15)).to(torch.int16)
    return places.transpose(0, 1).reshape(-1, indices.size(2))


def _order(places: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots in the order of their keys, and where those of each key start, one more at the end."""
    sorted_places, order = torch.sort(places.reshape(-1), stable=True)
    first = -(1 << 15) if places.dtype == torch.int16 else 0
    every = torch.arange(first, first + keys + 1, device=places.device).to(places.dtype)
    return order, torch.searchsorted(sorted_places, every)


@functools.cache
def _parts(dim: int, value: int) -> Parts:
    """Cut channels so that products are small: the first part holds most of the values, and is never cut short."""
    ways = []
    for first in {_floor(dim), _floor(max(_SMALLEST_DIM, value)), 1 << (max(_SMALLEST_DIM, value) - 1).bit_length()}:
        if first <= dim and (rest := 0 if first == dim else max(16, triton.next_power_of_2(dim - first))) <= 512:
            wide = value > first
            ways.append(((2 * (first + rest) + (rest if wide else 0) + first), first, rest, wide))
    _, first, rest, wide = min(ways)
    return Parts(first, rest, wide)


def _floor(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def _head_block(heads: int) -> int:
    return max(16, min(64, int(triton.next_power_of_2(heads))))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose last axis has unit stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
