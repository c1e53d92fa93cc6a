"""Kernels called with row count `NOTHING`: they must write nothing."""

from __future__ import annotations

from typing import Any

import torch

from megacpp_overlays.kernels.masked_products.panels import CLASS_ALIGNMENT, Panels
from megacpp_overlays.kernels.masked_products.row_counts import NOTHING
from megacpp_overlays.kernels.masked_products.token_selection import Selection
from megacpp_overlays.kernels.vocabulary_softmax.numbers import Coefficients, Statistics

ROWS, DEPTH, CLASSES = 300, 72, 2 * CLASS_ALIGNMENT + 72
OLD = 7.0
"""The numbers that results hold before."""


def count() -> torch.Tensor:
    """Return the number of rows."""
    return torch.tensor([NOTHING], dtype=torch.int32)


def selection() -> Selection:
    """Return one that nothing is to be done for; its order is not the identity."""
    order = torch.arange(ROWS).flip(0)
    return Selection(order, order.argsort(), count())


def panels(group_limit: int = 0, planned_rows: int = NOTHING) -> Panels:
    """Return panels of all classes, planned for no row or for those of an earlier pass."""
    found = Panels.cut(CLASSES, CLASS_ALIGNMENT, ROWS, torch.tensor([planned_rows], dtype=torch.int32), group_limit)
    assert found is not None
    return found


def written(*results: torch.Tensor) -> int:
    """Return how many numbers of these changed."""
    return sum(int((each != OLD).sum()) for each in results)


def room(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a result that is filled with OLD."""
    return torch.full(shape, OLD, dtype=dtype)


def by_passes(passes: Any) -> dict[str, int]:
    """Return how many numbers the passes of `vocabulary_softmax` write, those in PyTorch or in Triton."""
    labels, far = torch.zeros(ROWS, dtype=torch.int64), {}
    for spread in (False, True):
        running = Statistics(*room(4 if spread else 3, ROWS).unbind())
        coefficients = Coefficients(*torch.ones(4 if spread else 3, ROWS).unbind())
        for first in (False, True):
            block = room(ROWS, CLASS_ALIGNMENT)
            passes.add_statistics(block, labels, 0, running, first, None, None, None, selection())
            far[f"statistics, {spread}, {first}"] = written(*(each for each in running if each is not None), block)
        for cut in (panels(), panels(2, ROWS // 2)):
            block, out = room(ROWS, CLASS_ALIGNMENT), room(ROWS, CLASS_ALIGNMENT, dtype=torch.float16)
            passes.logits_gradient(block, labels, 0, coefficients, None, None, None, out, selection())
            add = passes.add_panel_statistics(block, labels, 0, running, None, None, None, selection(), cut)
            turn = passes.panel_gradients(block, labels, 0, coefficients, None, None, None, out, selection(), cut)
            for group in range(cut.number):
                add(group)
                turn(group)
            far[f"panels, {spread}, {cut.group_limit}"] = written(
                *(each for each in running if each is not None), block, out
            )
    return far
