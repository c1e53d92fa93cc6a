"""The k largest numbers of each row in one kernel: a row is read once, held in registers, and only positions are written.

One program for a row of at most LONGEST numbers. It finds the smallest number that is chosen by counting how many reach a guess,
and ends as soon as exactly k do. For numbers that differ that takes about ten guesses, and at most 48. A running count gives the
place of each chosen position. No atomics, nothing is sorted, and every row has one order. A longer row is cut into stretches. The
numbers chosen of each are chosen from once more, in the order of positions, until one stretch holds all that is left.

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
from megacpp_overlays.kernels.top_k.function import LONGEST

Bounds = tuple[torch.Tensor, torch.Tensor]
_STRETCH = LONGEST
"""Numbers of a row that one program chooses from."""
_NUMBERS_OF_A_WARP = 2048
"""64 a thread. With fewer a row is shared by more warps, which meet at every count; with more there is room for fewer rows."""
_GROUP = 16
"""Numbers that follow each other and are counted together."""
_RANKS_OF_A_WARP = 512
"""Ranks that a warp holds at a time: 16 a thread, which leaves room for several rows on a multiprocessor."""


def takes(device: torch.device) -> bool:
    """Return whether this kernel runs on a device."""
    if device.type == "cpu":
        return bool(device_code.INTERPRETED)
    return not measured.declines(device, "top-k", "PyTorch chooses")


def choose(scores: torch.Tensor, k: int, mark_infinite: bool, within: Bounds | None = None) -> torch.Tensor:
    """Return the positions: see `top_k.choose`. Scores have 16 or 32 bits, and there is something to choose.

    Args:
        scores: (..., queries, keys).
        k: how many are chosen; of rows longer than a stretch at most half a stretch.
        mark_infinite: see `top_k.choose`; True with bounds.
        within: starts and ends, (queries,), int32: only these columns are read, and others count as negative infinity.
    """
    keys = scores.size(-1)
    rows = scores.reshape(-1, keys)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    result = torch.empty((*scores.shape[:-1], k), dtype=torch.int64, device=scores.device)
    many = rows.size(0)
    with torch.cuda.device_of(scores):
        if keys <= _STRETCH:
            _launch(rows, None, within, result.view(many, 1, k), keys, mark_infinite)
            return result
        lists = torch.empty((many, triton.cdiv(keys, _STRETCH), k), dtype=torch.int32, device=scores.device)
        _launch(rows, None, within, lists, _STRETCH, mark_infinite)
        together = _STRETCH // k
        while lists.size(1) > together:
            fewer = lists.new_empty((many, triton.cdiv(lists.size(1), together), k))
            _launch(rows, lists, None, fewer, together * k, mark_infinite)
            lists = fewer
        _launch(rows, lists, None, result.view(many, 1, k), lists.size(1) * k, mark_infinite)
    return result


def _launch(
    rows: torch.Tensor,
    lists: torch.Tensor | None,
    within: Bounds | None,
    out: torch.Tensor,
    span: int,
    mark_infinite: bool,
) -> None:
    """Choose from each stretch of `span` columns: of scores, or of lists of their places."""
    columns = int(triton.next_power_of_2(span))
    group, many = min(_GROUP, columns), warps(columns)
    starts, ends = (out, out) if within is None else within
    device_code.choose_rows[out.size(0), out.size(1)](
        *(rows, out if lists is None else lists, starts, ends, out),
        *(rows.size(1) if lists is None else lists.size(1) * lists.size(2), span, out.size(2)),
        *(1 if within is None else starts.numel(), rows.stride(0)),
        MARKED=mark_infinite,
        BOUNDED=within is not None,
        LISTED=lists is not None,
        GROUP=group,
        GROUPS=columns // group,
        PARTS=max(1, columns // (many * _RANKS_OF_A_WARP)),
        num_warps=many,
    )


def warps(columns: int) -> int:
    """Return how many warps share a row."""
    return max(1, columns // _NUMBERS_OF_A_WARP)
