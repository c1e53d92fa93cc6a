"""Run in a fresh interpreter: compile attention whose warps share out the work for Hopper, which this host need not have; print JSON.

For each case, HEADS:DIM:VALUE:SIGN on the command line, the needs of each kernel, in the form of `index_scores_targets.py`; SIGN is that of
the scale.
"""

from __future__ import annotations

import torch
from index_scores_targets import Device, answer

QUERIES, KEYS, SLOTS = 16, 1024, 128
"""Multiples of 16, so that copies are asynchronous."""


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU: these kernels are for no others."""

    is_cuda = True  # type: ignore[assignment]


def compile_for(heads: int, dim: int, value: int, sign: int) -> None:
    """Compile both passes."""
    from triton.runtime import driver

    from megacpp_overlays.kernels.sparse_attention import in_triton

    driver.set_active(Device(90))
    torch.cuda.current_device = lambda: None  # the index of the device that these tensors are really on
    query, above, output = (torch.zeros(QUERIES, 1, heads, each, dtype=torch.bfloat16) for each in (dim, value, value))
    query = query.as_subclass(OnGpu)
    key, indices = torch.zeros(KEYS, 1, 1, dim, dtype=torch.bfloat16), torch.zeros(1, QUERIES, SLOTS, dtype=torch.int32)
    sink, lse = torch.zeros(heads), torch.zeros(QUERIES, 1, heads)
    in_triton.forward(query, key, indices, sign * 0.1, value, sink, None, learns=True)
    remainder = torch.zeros(output.shape, dtype=torch.int16)
    in_triton.backward(above, lse, query, key, indices, sign * 0.1, None, None, output, remainder, lse)


if __name__ == "__main__":
    answer(compile_for, machine_code=True)
