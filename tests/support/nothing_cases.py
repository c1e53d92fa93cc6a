"""Everything that is told a number of rows, with `NOTHING` for it: what it writes, by name."""

from __future__ import annotations

from typing import Any

import torch

from megacpp_overlays.kernels.masked_products.panels import NOTHING, WIDTH, Panels
from megacpp_overlays.kernels.masked_products.token_selection import Selection
from megacpp_overlays.kernels.vocabulary_softmax.numbers import Coefficients, Statistics

ROWS, DEPTH, CLASSES = 300, 72, 2 * WIDTH + 72
OLD = 7.0
"""What results hold before."""


def count() -> torch.Tensor:
    """Return the number of rows."""
    return torch.tensor([NOTHING], dtype=torch.int32)


def selection() -> Selection:
    """Return one that nothing is to be done for; its order is not the identity."""
    order = torch.arange(ROWS).flip(0)
    return Selection(order, order.argsort(), count())


def panels(most: int = 0, laid: int = NOTHING) -> Panels:
    """Return panels of all classes, as they are laid on a way that is empty, or as they were."""
    found = Panels.cut(CLASSES, WIDTH, ROWS, torch.tensor([laid], dtype=torch.int32), most)
    assert found is not None
    return found


def written(*results: torch.Tensor) -> int:
    """Return how many numbers of these changed."""
    return sum(int((each != OLD).sum()) for each in results)


def room(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a result that holds what it held before."""
    return torch.full(shape, OLD, dtype=dtype)


def by_passes(passes: Any) -> dict[str, int]:
    """Return what the passes of `vocabulary_softmax` write, those in PyTorch or in Triton."""
    labels, far = torch.zeros(ROWS, dtype=torch.int64), {}
    for spread in (False, True):
        running = Statistics(*room(4 if spread else 3, ROWS).unbind())
        coefficients = Coefficients(*torch.ones(4 if spread else 3, ROWS).unbind())
        for first in (False, True):
            block = room(ROWS, WIDTH)
            passes.add_statistics(block, labels, 0, running, first, None, None, None, selection())
            far[f"statistics, {spread}, {first}"] = written(*(each for each in running if each is not None), block)
        for cut in (panels(), panels(2, ROWS // 2)):
            block, out = room(ROWS, WIDTH), room(ROWS, WIDTH, dtype=torch.float16)
            passes.logits_gradient(block, labels, 0, coefficients, None, None, None, out, selection())
            add = passes.add_panel_statistics(block, labels, 0, running, None, None, None, selection(), cut)
            turn = passes.panel_gradients(block, labels, 0, coefficients, None, None, None, out, selection(), cut)
            for group in range(cut.number):
                add(group)
                turn(group)
            far[f"panels, {spread}, {cut.most}"] = written(*(each for each in running if each is not None), block, out)
    return far
