"""Index scores on tensor cores: bfloat16 in, float32 sums, and never more than two axes of scores.

The product of two bfloat16 numbers is exact in float32, so tensor cores lose nothing that a float32 product keeps.
The backward multiplies a float32 gradient with keys or queries, and for that it uses float16 throughout. Scaled by a
power of two so that the largest lies just below 2**14, bfloat16 numbers keep their values down to 2**-28 of the
largest. A gradient is scaled by the largest of its strip, 64 queries or as many keys as a program has. It becomes one
float16 number, times its weight, for the sum over queries, and two, 22 bits, for the sum over keys: a softmax gradient
adds up to 0 there, and the common part of the keys cancels. Numbers of 2**-28 of the largest in their strip, or less, lose bits.

No atomics: every element has one program, and every sum one order. Blocks of the gradient that are all 0, as above the
diagonal of a causal loss, are skipped where they lie before the first other block or after the last; there 0 times
a NaN is 0.

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

from megacpp_overlays.kernels.index_scores import device_code

_LARGEST_DIM = 256
_SQUARE = 64
"""Rows and columns of the blocks that are looked at for zeros."""
_WIDE = 4
"""How many of them, side by side, one program looks at."""
_HEADS = 64
"""How many are added up one after the other: rounding grows with their number."""
_PARTS = 8
_SHARED, _SHARED_BEYOND_128 = 99 * 1024, 163 * 1024
"""Bytes of shared memory that a device must offer: those of capability 8.6 and 12.0, and those of 8.0. A newer one may use more."""


def takes(dim: int, device: torch.device) -> bool:
    """Return whether these kernels run for a head dimension on a device."""
    if dim > _LARGEST_DIM:
        return False
    if device.type == "cpu":
        return bool(device_code.INTERPRETED)
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    found = torch.cuda.get_device_properties(device)
    needed = _SHARED if dim <= 128 else _SHARED_BEYOND_128
    return bool(found.major >= 8 and found.shared_memory_per_block_optin >= needed)


def scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    use_relu: bool,
    within: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the index scores: see `index_scores.scores`. q and k are bfloat16.

    With bounds, starts and ends of (queries,), int32, scores outside them need not be written.
    """
    q, k = _rows(q), _rows(k)
    queries, batch, heads, dim = q.shape
    keys = k.size(0)
    if 0 in {heads, dim}:
        return torch.zeros((batch, queries, keys), dtype=torch.float32, device=q.device)
    result = torch.empty((batch, queries, keys), dtype=torch.float32, device=q.device)
    if result.numel() == 0:
        return result
    first = min(128, _padded(dim))
    rest = _padded(dim - first) if dim > first else 0
    tile = _tile(64, 128, 8, 3) if rest else _tile(64, 128, 4, 4)
    across = triton.cdiv(keys, tile["COLUMNS"])
    tiles = _tiles(triton.cdiv(queries, tile["ROWS"]), across * batch, q.device)
    programs = triton.cdiv(queries, tiles * tile["ROWS"]) * across
    by_head = _by_head(weights)
    starts, ends = (by_head, by_head) if within is None else within
    with _on(q):
        for start in range(0, heads, _HEADS):
            some = slice(start, start + _HEADS)
            device_code.score_tiles[programs, batch](
                *(q[:, :, some], by_head[:, some], k, starts, ends, result),
                *(queries, keys, min(_HEADS, heads - start), dim),
                *(*q.stride()[:3], *k.stride()[:2], by_head.stride(0)),
                one=1.0,
                RELU=use_relu,
                BOUNDED=within is not None,
                DIM=first,
                REST=rest,
                FULL=first + rest == dim,
                ADD=start > 0,
                TILES=tiles,
                **tile,
            )
    return result


def gradients(
    grad: torch.Tensor, q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, use_relu: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients: see `index_scores.gradients`. q and k are bfloat16."""
    grad, q, k = _rows(grad.float()), _rows(q), _rows(k)
    queries, batch, heads, dim = q.shape
    keys = k.size(0)
    of_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    of_weights = torch.empty(weights.shape, dtype=weights.dtype, device=q.device)
    if 0 in {grad.numel(), heads, dim}:
        return of_q.zero_(), of_weights.zero_(), torch.zeros(k.shape, dtype=k.dtype, device=k.device)
    squares = (batch, triton.cdiv(queries, _SQUARE), triton.cdiv(keys, _SQUARE))
    peaks = torch.empty(squares, dtype=torch.float32, device=q.device)
    by_head = _by_head(weights)
    sides = {
        "RELU": use_relu,
        "DIM": _padded(dim),
        "FULL": _padded(dim) == dim,
        "SQUARE": _SQUARE,
        "SQUARES_DOWN": triton.next_power_of_2(squares[1]),
        "SQUARES_ACROSS": triton.next_power_of_2(squares[2]),
    }
    with _on(q):
        device_code.find_peaks[squares[1], triton.cdiv(squares[2], _WIDE), batch](
            *(grad, peaks, queries, keys, *grad.stride()[:2]), SQUARE=_SQUARE, WIDE=_WIDE
        )
        # The scaled queries lie where their gradient will: each program of the last kernel reads its own and replaces it.
        half_q, q_peak = _half(q, of_q.view(torch.float16))
        half_k, k_peak = _half(k[:, :, None], torch.empty(k.shape, dtype=torch.float16, device=k.device))
        tensors = (grad, peaks, half_q, by_head, half_k)
        scales = (q_peak, k_peak, _peak(by_head))
        sizes = (queries, batch, keys, heads, dim, *grad.stride()[:2])
        tile = _tile(64, 64, 4, 3) if dim <= 64 else _tile(64, 128, 8, 3 if dim <= 128 else 2)
        tiles = triton.cdiv(keys, tile["COLUMNS"])
        parts = _parts(tiles * batch, queries // dim, q.device)
        of_k = torch.empty((parts, keys, batch, dim), dtype=torch.float32, device=q.device)
        device_code.key_side[tiles, batch, parts](*tensors, *scales, of_k, *sizes, **sides, **tile)
        tile = _tile(64, 64 if dim <= 128 else 32, 4, 3)
        whole = keys % tile["COLUMNS"] == 0
        device_code.query_side[squares[1] * heads, batch](
            *tensors, *scales, of_q, of_weights, *sizes, WHOLE=whole, **sides, **tile
        )
    return of_q, of_weights, of_k.sum(dim=0).to(k.dtype)


def _peak(tensor: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude as a float32 number on the device."""
    return torch.linalg.vector_norm(tensor, ord=float("inf"), dtype=torch.float32)


def _half(tensor: torch.Tensor, half: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Write (rows, batch, heads, dim), scaled by its peak, into a contiguous float16 tensor; return it and the peak."""
    rows, batch, heads, dim = tensor.shape
    peak = _peak(tensor)
    device_code.to_half[triton.cdiv(rows, 16) * heads, batch](
        *(tensor, half, peak, rows, heads, dim), *tensor.stride()[:3], DIM=_padded(dim), ROWS=16
    )
    return half, peak


def _tile(rows: int, columns: int, warps: int, stages: int) -> dict[str, Any]:
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": warps, "num_stages": stages}


def _on(tensor: torch.Tensor) -> Any:
    """Launch where the tensor is, whichever device is current."""
    return torch.cuda.device_of(tensor)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose last axis has unit stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _padded(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def _by_head(weights: torch.Tensor) -> torch.Tensor:
    """Return float32 weights as (batch, heads, queries), so that the queries of a tile lie side by side."""
    queries, batch, heads = weights.shape
    return torch.empty((batch, heads, queries), dtype=torch.float32, device=weights.device).copy_(
        weights.permute(1, 2, 0)
    )


def _parts(programs: int, most: int, device: torch.device) -> int:
    """Return into how many parts the queries are cut, so that few keys still keep the device busy to the end.

    Each has a gradient of all keys of its own, so with few queries there are few parts.
    """
    return max(1, min(_PARTS, most, -(-6 * _processors(device) // programs)))


def _tiles(down: int, across: int, device: torch.device) -> int:
    """Return how many tiles of scores one program writes: two keep it busier, if there are enough for every processor."""
    return 2 if down * across >= 16 * _processors(device) else 1


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
