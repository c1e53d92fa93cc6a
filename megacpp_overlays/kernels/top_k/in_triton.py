"""The k largest numbers of each row in one kernel: a row is read once, held in registers, and only positions are written.

One program for a row. It finds the smallest number that is chosen by counting how many reach a guess, and ends as soon as
exactly k do, which for numbers that differ is after about ten guesses, and at most 48. Where each chosen position goes is what a
running count says. No atomics, nothing is sorted, and every row has one order.

CPU tensors in the Triton interpreter, and NVIDIA devices of capability 9 with Triton 3.6.
"""

from __future__ import annotations

import torch
import triton
from packaging.version import Version

if Version(triton.__version__) < Version("3.6"):
    raise ImportError(f"triton {triton.__version__} is older than 3.6, the oldest that was tried")

from megacpp_overlays.kernels import measured
from megacpp_overlays.kernels.top_k import device_code

_NUMBERS_OF_A_WARP = 2048
"""64 a thread. With fewer a row is shared by more warps, which meet at every count; with more there is room for fewer rows."""
_GROUP = 16
"""Numbers that follow each other and are counted together."""
_RANKS_OF_A_WARP = 512
"""How many ranks a warp holds at a time: 16 a thread, beside which several rows have room on a multiprocessor."""


def takes(device: torch.device) -> bool:
    """Return whether this kernel runs on a device."""
    if device.type == "cpu":
        return bool(device_code.INTERPRETED)
    return not measured.declines(device, "top-k", "PyTorch chooses")


def choose(scores: torch.Tensor, k: int, mark_infinite: bool) -> torch.Tensor:
    """Return the positions: see `top_k.choose`. Scores have 16 or 32 bits, and there is something to choose."""
    keys = scores.size(-1)
    rows = scores.reshape(-1, keys)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    result = torch.empty((*scores.shape[:-1], k), dtype=torch.int64, device=scores.device)
    columns = int(triton.next_power_of_2(keys))
    group, many = min(_GROUP, columns), warps(columns)
    parts = max(1, columns // (many * _RANKS_OF_A_WARP))
    sizes = {"GROUP": group, "GROUPS": columns // group, "PARTS": parts, "MARKED": mark_infinite, "num_warps": many}
    with torch.cuda.device_of(scores):
        device_code.choose_rows[rows.size(0),](*(rows, result, keys, k, rows.stride(0)), **sizes)
    return result


def warps(columns: int) -> int:
    """Return how many warps share a row."""
    return max(1, columns // _NUMBERS_OF_A_WARP)
