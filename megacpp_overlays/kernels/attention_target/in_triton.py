"""Attention probabilities summed over heads on tensor cores: bfloat16 or float16 in, float32 sums, one tensor out.

Two passes. The first goes over the keys of some queries of one head and keeps the largest score and the inverse of the
sum of exponentials. The second takes a tile of queries and keys, adds the probabilities up over heads in registers and
writes the tile once. Products are computed twice and scores never written.

The product of two bfloat16 or float16 numbers is exact in float32. No atomics: every element has one program, and every
sum one order. Keys outside the bounds of all rows of a tile are skipped.

NVIDIA devices of capability 8 and above with Triton 3.6 or newer, and CPU tensors in the Triton interpreter.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from packaging.version import Version

if Version(triton.__version__) < Version("3.6"):
    raise ImportError(f"triton {triton.__version__} is older than 3.6, the oldest that was tried")

from megacpp_overlays.kernels.attention_target import device_code
from megacpp_overlays.kernels.attention_target.validity import Validity

_LARGEST_DIM = 640
_CHUNK = 64
"""How much of the head dimension is loaded at a time."""
_SHARED, _SHARED_OF_LARGE_TILES = 99 * 1024, 200 * 1024
"""Bytes of shared memory that a device must offer: those of capability 8.6 and 12.0; for larger tiles, those of 9.0."""


def takes(dim: int, device: torch.device) -> bool:
    """Return whether these kernels run for a head dimension on a device."""
    if not 0 < dim <= _LARGEST_DIM:
        return False
    if device.type == "cpu":
        return bool(device_code.INTERPRETED)
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    found = torch.cuda.get_device_properties(device)
    return bool(found.major >= 8 and found.shared_memory_per_block_optin >= _SHARED)


def target(query: torch.Tensor, key: torch.Tensor, scale: float, valid: Validity) -> torch.Tensor:
    """Return the softmax over valid keys, summed over heads: see `attention_target.target`. Both are of one dtype."""
    query, key = _rows(query), _rows(key)
    queries, batch, heads, dim = query.shape
    keys = key.size(0)
    result = torch.empty((batch, queries, keys), dtype=torch.float32, device=query.device)
    if result.numel() == 0 or heads == 0:
        return result.zero_()
    peaks, inverses = (torch.empty((batch, heads, queries), dtype=torch.float32, device=query.device) for _ in range(2))
    starts, ends = (each.contiguous() for each in (valid.starts, valid.ends))
    mask, allowed = (None if each is None else _rows(each) for each in (valid.mask, valid.allowed))
    # Without flags of allowed keys the kernels read none, so any address will do.
    flags = _flags(starts) if allowed is None else allowed
    tensors = (query, key, starts, ends, mask, valid.mask_matters, flags, peaks, inverses)
    numbers = (
        *(queries, keys, heads, dim, scale, *query.stride()[:3]),
        *(*key.stride()[:2], key.stride(2) if key.size(2) > 1 else 0),
        *(_batch_stride(starts), *_strides(mask), *_strides(allowed), int(allowed is not None)),
    )
    sizes: dict[str, Any] = {"MASKED": mask is not None, **_chunks(dim)}
    large = _has_room(query.device)
    with torch.cuda.device_of(query):
        tile = _tile(dim, narrow=False, large=large)
        device_code.row_sums[triton.cdiv(queries, tile["ROWS"]) * heads, batch](*tensors, *numbers, **sizes, **tile)
        tile = _tile(dim, narrow=mask is not None, large=large)
        tiles = triton.cdiv(queries, tile["ROWS"]) * triton.cdiv(keys, tile["COLUMNS"])
        device_code.sum_tiles[tiles, batch](*tensors, result, *numbers, **sizes, **tile)
    return result


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose last axis has unit stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _flags(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as a pointer to flags."""
    return tensor.view(torch.bool)


def _batch_stride(tensor: torch.Tensor) -> int:
    return tensor.stride(0) if tensor.size(0) > 1 else 0


def _strides(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Return the strides of batch and row; 0 for a batch that all share."""
    return (0, 0) if tensor is None else (_batch_stride(tensor), tensor.stride(1))


def _chunks(dim: int) -> dict[str, Any]:
    """Return in which parts the head dimension is loaded: side by side while a few of them fit into shared memory."""
    chunk = min(_CHUNK, max(16, int(triton.next_power_of_2(dim))))
    chunks = triton.cdiv(dim, chunk)
    return {"CHUNK": chunk, "CHUNKS": chunks, "FULL": dim % chunk == 0, "UNROLLED": chunks <= 3}


def _tile(dim: int, *, narrow: bool, large: bool) -> dict[str, Any]:
    """Return the tile; narrow where a mask takes registers, too."""
    side_by_side = dim <= 3 * _CHUNK
    if large:
        stages = (3 if dim <= 2 * _CHUNK else 2) if side_by_side else 4
        return {"ROWS": 128, "COLUMNS": 64 if narrow else 128, "num_warps": 8, "num_stages": stages}
    stages = (3 if dim <= 2 * _CHUNK else 2) if side_by_side else 3
    return {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": stages}


@functools.cache
def _has_room(device: torch.device) -> bool:
    """Return whether the shared memory holds large tiles; in the interpreter small ones, so that there are several."""
    if device.type != "cuda":
        return False
    return bool(torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= _SHARED_OF_LARGE_TILES)
