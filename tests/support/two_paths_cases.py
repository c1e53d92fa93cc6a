"""Calls of a linear cross entropy that may leave out tokens or compute all, in memory that shows where nothing was written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from linear_cross_entropy_cases import IGNORED, Inputs, draw

from megacpp_overlays.kernels.linear_cross_entropy import shard_passes
from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory
from megacpp_overlays.kernels.linear_cross_entropy.panel_path import PanelPath
from megacpp_overlays.kernels.linear_cross_entropy.two_paths import TwoPaths

TOKENS = 300
"""No multiple of 128, and room for two panels where few count."""
SIZES = {
    torch.float64: ((TOKENS, 240, 2100), Memory(extra_mib=2, masked="skip")),
    torch.bfloat16: ((TOKENS, 400, 3000), Memory(extra_mib=1, masked="skip")),
    torch.float16: ((TOKENS, 400, 3000), Memory(extra_mib=1, masked="skip")),
}
"""Sizes and a memory in which blocks are wider without a copy of the hidden states than with one."""
SIZES_ON_A_GPU, MEMORY_ON_A_GPU = (1000, 520, 20001), Memory(extra_mib=7, masked="skip")
"""The same in bfloat16 and float16, where blocks have the width of full waves of 132 multiprocessors."""


def memory_of(dtype: torch.dtype) -> Memory:
    """Return the memory for a call of this dtype."""
    return SIZES[dtype][1]


def labelled(count: int, *, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> Inputs:
    """Return a call with contiguous tensors that ignores all but so many tokens, anywhere."""
    inputs = draw(*SIZES[dtype][0], seed=seed, dtype=dtype, **options)
    target = torch.where(inputs.alive, inputs.target, 0)
    target[torch.randperm(TOKENS, generator=torch.Generator().manual_seed(seed))[count:]] = IGNORED
    inputs.target, inputs.hidden, inputs.weight = target, inputs.hidden.contiguous(), inputs.weight.contiguous()
    return inputs


@contextlib.contextmanager
def poisoned() -> Iterator[list[TwoPaths]]:
    """Fill new memory with NaN, and yield the plan of each pass that goes two paths."""
    plans: list[TwoPaths] = []
    empty, empty_like, panel_paths = torch.empty, torch.empty_like, shard_passes.panel_paths

    def spoil(made: torch.Tensor) -> torch.Tensor:
        if made.dtype == torch.uint8:
            return made.fill_(255)  # NaN in every dtype
        return made.fill_(float("nan")) if made.is_floating_point() else made

    def remember(plan: TwoPaths, hidden: torch.Tensor, buffer: torch.Tensor) -> tuple[PanelPath, PanelPath]:
        plans.append(plan)
        return panel_paths(plan, hidden, buffer)

    with (
        mock.patch.object(torch, "empty", lambda *given, **named: spoil(empty(*given, **named))),
        mock.patch.object(torch, "empty_like", lambda *given, **named: spoil(empty_like(*given, **named))),
        mock.patch.object(shard_passes, "panel_paths", remember),
    ):
        yield plans
