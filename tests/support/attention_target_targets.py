"""Run in a fresh interpreter: compile the kernels of the attention target for devices that this host need not have.

Prints JSON, as `index_scores_targets.py` does, for each `architecture:dim:shared memory` on the command line.
"""

from __future__ import annotations

import torch
from attention_target_cases import valid_of
from index_scores_targets import Device, answer

QUERIES, KEYS, BATCH, HEADS = 256, 256, 2, 4
"""Multiples of 16, so that copies are asynchronous and pipelines as deep as they get."""
KINDS = ("causal", "support", "support and mask")


def compile_for(architecture: int, dim: int, shared: int) -> None:
    from triton.runtime import driver

    from megacpp_overlays.kernels.attention_target import in_triton
    from megacpp_overlays.kernels.attention_target.validity import validity

    driver.set_active(Device(architecture))
    in_triton._has_room = lambda _device: shared >= in_triton._SHARED_OF_LARGE_TILES
    names = ("starts", "ends", "key_positions", "mask", "topk_indices")
    for kind in KINDS:
        valid = valid_of(kind, QUERIES, KEYS, BATCH)
        query, key = (torch.zeros(size, BATCH, HEADS, dim, dtype=torch.bfloat16) for size in (QUERIES, KEYS))
        in_triton.target(query, key, 0.125, validity(QUERIES, KEYS, *(valid.get(name) for name in names)))


if __name__ == "__main__":
    answer(compile_for)
