"""Some tokens out of many, where only the device knows how many: they come first, and products end after them.

A training mask, a prompt or the padding of a packed batch leaves tokens without a gradient, often half of them. To ask
how many there are would wait for the device, and could not be captured in a graph, so shapes stay those of all tokens.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch

from megacpp_overlays.kernels.devices import on_device_of

in_triton: ModuleType | None
try:
    from megacpp_overlays.kernels.masked_products import token_selection_triton as in_triton
except ImportError:  # no Triton here
    in_triton = None

_PARTS = 4
"""In which rows are rounded when they go back: a rounded copy of all of them at once would be the largest of all."""


class Selection(NamedTuple):
    """Which tokens are selected."""

    order: torch.Tensor
    """(tokens,), int64: the selected tokens in their order, then the others in theirs."""
    count: torch.Tensor
    """(1,), int32: how many are selected."""

    def first(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows, (tokens, ...), that has those of the selected tokens first."""
        return rows.index_select(0, self.order)

    def bring_first(self, rows: torch.Tensor) -> None:
        """Do the same in place; rows after those of the selected tokens hold anything then.

        Args:
            rows: (tokens, n), rows of unit stride.
        """
        if rows.is_cuda and in_triton is not None:
            with on_device_of(rows):
                in_triton.bring_first(rows, self.order, self.count)
        else:
            rows[: int(self.count)] = rows[self.order[: int(self.count)]]

    def put_back(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows where they came from; in the same memory, if a device has Triton and the dtype stays.

        Args:
            rows: (tokens, n), rows of unit stride, those of the selected tokens first, zeros after them.
            dtype: of the result.
        """
        if rows.dtype == dtype and rows.is_cuda and in_triton is not None:
            with on_device_of(rows):
                in_triton.put_back(rows, self.order, self.count)
            return rows
        back = torch.empty(rows.shape, dtype=dtype, device=rows.device)
        if back.dtype == rows.dtype:
            return back.index_copy_(0, self.order, rows)
        for order, part in zip(self.order.chunk(_PARTS), rows.chunk(_PARTS), strict=True):
            back.index_copy_(0, order, part.to(dtype))
        return back


def select(wanted: torch.Tensor) -> Selection:
    """Return the tokens where `wanted`, (tokens,), is true."""
    order = torch.argsort(wanted.logical_not().to(torch.uint8), stable=True)
    return Selection(order, wanted.sum(dtype=torch.int32).view(1))
