"""Run in a fresh interpreter: compile attention over quantized keys for Hopper, which this host need not have; print JSON.

For each case, HEADS:DIM:VALUE:BIAS:SCALES on the command line, the needs of each kernel, in the form of `index_scores_targets.py`. These
are the kernels that read FP8 numbers themselves, as for few queries of many keys. The kernels whose warps share out the work are for GPU
tensors, and get opened keys.
"""

from __future__ import annotations

import torch
from index_scores_targets import Device, answer

QUERIES, KEYS, SLOTS = 16, 1024, 128
"""Multiples of 16, so that copies are asynchronous and pipelines as deep as they get; so few reads of a key that it is not opened."""


def compile_for(heads: int, dim: int, value: int, is_biased: int, scales: int) -> None:
    """Compile both passes."""
    from triton.runtime import driver

    from megacpp_overlays.kernels.sparse_attention import in_triton

    driver.set_active(Device(90))
    query, above, output = (torch.zeros(QUERIES, 1, heads, each, dtype=torch.bfloat16) for each in (dim, value, value))
    key, key_scales = torch.zeros(KEYS, 1, 1, dim, dtype=torch.uint8), torch.ones(KEYS, 1, scales)
    indices = torch.zeros(1, QUERIES, SLOTS, dtype=torch.int32)
    bias, lse = torch.zeros(1, QUERIES, SLOTS) if is_biased else None, torch.zeros(QUERIES, 1, heads)
    in_triton.forward(query, key, indices, 0.1, value, None, bias, key_scales, learns=True)
    remainder = torch.zeros(output.shape, dtype=torch.int16)
    in_triton.backward(above, lse, query, key, indices, 0.1, None, bias, output, remainder, lse, key_scales)


if __name__ == "__main__":
    answer(compile_for)
