"""Run in a fresh interpreter: compile the top-k for Hopper, which this host need not have; print JSON.

For each case, KEYS:MARKED on the command line, the needs of each kernel, in the form of `index_scores_targets.py`.
"""

from __future__ import annotations

import torch
from index_scores_targets import Device, answer


def compile_for(keys: int, is_marked: int) -> None:
    """Compile the kernel for a few rows of each dtype that it takes."""
    from triton.runtime import driver

    from megacpp_overlays.kernels.top_k import in_triton
    from megacpp_overlays.kernels.top_k.function import LONGEST, MOST_OF_LONG_ROWS

    driver.set_active(Device(90))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        scores = torch.zeros(4, keys, dtype=dtype)
        k = min(max(1, keys // 2), MOST_OF_LONG_ROWS)
        in_triton.choose(scores, k, bool(is_marked))
        if is_marked:
            bounds = torch.zeros(4, dtype=torch.int32)
            in_triton.choose(scores[:, :LONGEST], k, True, (bounds, bounds))


if __name__ == "__main__":
    answer(compile_for)
