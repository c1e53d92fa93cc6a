"""The k largest numbers of each row in one kernel: a row is read once, held in registers, and only positions are written.

One program for a row. It finds the smallest number that is chosen in at most 33 counts over the row, and ends as soon as
exactly k numbers reach what it tries, which for numbers that differ is after a dozen or so. Where each chosen position goes
is what a running count says. No atomics, nothing is sorted, and every row has one order.

CPU tensors in the Triton interpreter; and, once it was run on one, NVIDIA devices of capability 9 with Triton 3.6.
"""

from __future__ import annotations

import torch
import triton
from packaging.version import Version

if Version(triton.__version__) < Version("3.6"):
    raise ImportError(f"triton {triton.__version__} is older than 3.6, the oldest that was tried")

from megacpp_overlays.kernels import measured
from megacpp_overlays.kernels.top_k import device_code

_NUMBERS_OF_A_WARP, _NUMBERS_OF_A_WARP_IN_LONG_ROWS = 512, 1024
_LONG = 8192
_CHUNK_OF_A_WARP = 128
"""How many numbers it looks at together when positions are written."""

WAS_RUN_ON_A_GPU = False
"""What no GPU has run yet is not what a training run should find it out by; `tests/gpu/test_top_k.py` says otherwise for itself."""


def takes(device: torch.device) -> bool:
    """Return whether this kernel runs on a device."""
    if device.type == "cpu":
        return bool(device_code.INTERPRETED)
    return WAS_RUN_ON_A_GPU and not measured.declines(device, "top-k", "PyTorch chooses")


def choose(scores: torch.Tensor, k: int, mark_infinite: bool) -> torch.Tensor:
    """Return the positions: see `top_k.choose`. Scores have 16 or 32 bits, and there is something to choose."""
    keys = scores.size(-1)
    rows = scores.reshape(-1, keys)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    result = torch.empty((*scores.shape[:-1], k), dtype=torch.int64, device=scores.device)
    columns = int(triton.next_power_of_2(keys))
    many = warps(columns)
    sizes = {"COLUMNS": columns, "CHUNK": min(columns, many * _CHUNK_OF_A_WARP), "num_warps": many}
    with torch.cuda.device_of(scores):
        device_code.choose_rows[rows.size(0),](*(rows, result, keys, k, rows.stride(0)), MARKED=mark_infinite, **sizes)
    return result


def warps(columns: int) -> int:
    """Return how many warps share a row: 16 numbers a thread, 32 in long rows."""
    return max(1, columns // (_NUMBERS_OF_A_WARP if columns < _LONG else _NUMBERS_OF_A_WARP_IN_LONG_ROWS))
