"""Some tokens out of many, where only the device knows how many: they come first, and products end after them.

A training mask, a prompt or the padding of a packed batch leaves tokens without a label or a gradient, often half of
them. To ask how many there are would wait for the device, and could not be captured in a graph, so shapes stay those of
all tokens.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch

from megacpp_overlays.kernels.devices import on_device_of
from megacpp_overlays.kernels.masked_products.panels import Panels
from megacpp_overlays.kernels.masked_products.row_counts import ROW_ALIGNMENT, aligned_rows

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
    place: torch.Tensor
    """(tokens,), int64: where a token is in that order."""
    count: torch.Tensor
    """(1,), int32: how many are selected. With `row_counts.NOTHING` no row moves."""

    def first(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows of the selected tokens, in a tensor that has room for all.

        Zeros follow as far as `row_counts.ROW_ALIGNMENT` says; rows after those hold anything.

        Args:
            rows: (tokens, n), rows of unit stride. Rows of other tokens are not read.
            out: that tensor, of the same shape and dtype and with rows of unit stride; None takes new memory.
        """
        out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device) if out is None else out
        if rows.is_cuda and in_triton is not None:
            with on_device_of(rows):
                in_triton.first(rows, self.order, self.count, ROW_ALIGNMENT, out)
                return out
        if (count := int(self.count)) >= 0:
            out[:count] = rows[self.order[:count]]
            out[count : aligned_rows(count)].zero_()
        return out

    def bring_first(self, rows: torch.Tensor, panels: Panels | None = None) -> None:
        """Move the rows of the selected tokens to the front, in place; rows after those of the selected tokens hold anything then.

        Args:
            rows: (tokens, n), rows of unit stride.
            panels: whose first group these rows hold; in each of them, then.
        """
        if rows.is_cuda and in_triton is not None:
            with on_device_of(rows):
                in_triton.bring_first(rows, self.order, self.count, panels)
            return
        first = self.order[: max(0, int(self.count))]
        for part in [rows] if panels is None else [rows[each] for each, _ in panels.slices(0)]:
            part[: len(first)] = part[first]

    def among(self, others: Selection) -> Selection:
        """Return where these tokens are among selected ones, all of which come first: for `bring_first` alone.

        Args:
            others: a selection of the same tokens that has all of these.
        """
        order = others.place.index_select(0, self.order)
        return self._replace(order=order)

    def put_back(self, rows: torch.Tensor, dtype: torch.dtype, *, in_place: bool = False) -> torch.Tensor:
        """Return rows where they came from, and zeros where none came from.

        Args:
            rows: (tokens, n), rows of unit stride, those of the selected tokens first; the rows after them are not read.
            dtype: of the result.
            in_place: whether the result may have the memory of `rows`, where a device has Triton and the dtype stays.
        """
        if rows.is_cuda and in_triton is not None:
            with on_device_of(rows):
                if in_place and rows.dtype == dtype:
                    in_triton.put_back(rows, self.order, self.count)
                    return rows
                back: torch.Tensor = in_triton.put_back_apart(rows, self.place, self.count, dtype)
                return back
        back, count = torch.zeros(rows.shape, dtype=dtype, device=rows.device), int(self.count)
        for order, part in zip(self.order[:count].chunk(_PARTS), rows[:count].chunk(_PARTS), strict=True):
            back.index_copy_(0, order, part.to(dtype))
        return back


def select(wanted: torch.Tensor) -> Selection:
    """Return the tokens where `wanted`, (tokens,), bool, is true."""
    if wanted.is_cuda and in_triton is not None:
        with on_device_of(wanted):
            return Selection(*in_triton.select(wanted.contiguous()))
    order = torch.argsort(wanted.logical_not().to(torch.uint8), stable=True)
    return Selection(order, torch.argsort(order), wanted.sum(dtype=torch.int32).view(1))
