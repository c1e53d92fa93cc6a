"""Reductions of two orders that are right without the overlay: of norms with parameters of their own, which stay in one kernel, and of small tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)


def _own_parameters(rows: Any, table: Any, weight: Any) -> Any:
    import torch

    return torch.nn.functional.rms_norm(rows, rows.shape[-1:], table.sum(1).flatten()) @ weight


def _measured(function: Callable[..., Any], shape: tuple[int, ...], slices: int) -> Mapping[str, list[float]]:
    """Return norms of gradients, some of their numbers, and how many kernels have reductions of two orders."""
    import torch
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor import metrics

    given = PACK.inputs(shape, slices=slices)
    with (
        PACK.compiling(),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        before = metrics.codegen_mix_order_reduction
        found = PACK.gradients(torch.compile(function), *given)
    numbers = {
        f"gradient {number}": [float(each.norm()), *each.flatten()[:100].tolist()] for number, each in enumerate(found)
    }
    return {**numbers, "kernels": [float(metrics.codegen_mix_order_reduction - before)]}


ASKED: Mapping[str, tuple[Callable[..., Any], tuple[int, ...], int]] = {
    "parameters-of-their-own": (_own_parameters, (2, 8192, 1536), 1),
    "small-table": (PACK._two_norms, (1, 256, 1024), 4),
}
NEIGHBOURS = tuple(
    Neighbour(name=name, overlay=PACK.OVERLAY, after="table-gpu", run=functools.partial(_measured, *asked))
    for name, asked in ASKED.items()
)
