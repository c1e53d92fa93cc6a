"""Products of matrices that have a row for each token, where only the first rows may count.

How many those are only the device knows. On CUDA devices of compute capability 9, in half precision, Triton 3.6 computes
such products without asking it, so nothing waits and a graph can be captured; on the CPU the number is simply read.
Everything else has only products over all rows: ask `available` first.

A count of `row_counts.NOTHING` leaves results as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch

from megacpp_overlays.kernels.devices import launching_there, on_device_of
from megacpp_overlays.kernels.linear_cross_entropy.products import add_product, product
from megacpp_overlays.kernels.masked_products.panels import Panels
from megacpp_overlays.kernels.measured import declines

in_triton: ModuleType | None
try:
    from megacpp_overlays.kernels.masked_products import products_triton as in_triton
except ImportError:  # no Triton here, or one without tensor descriptors
    in_triton = None

_DTYPES = (torch.bfloat16, torch.float16)


def available(dtype: torch.dtype, *matrices: torch.Tensor) -> bool:
    """Return whether there are products that end after some rows.

    Args:
        dtype: of the factors.
        matrices: (m, n), factors or results, on one device, as they are or copied row after row.
    """
    device = matrices[0].device
    if device.type == "cpu":
        return True
    if device.type != "cuda" or in_triton is None or dtype not in _DTYPES:
        return False
    if declines(device, "linear cross entropy", "no token is skipped here, all are computed"):
        return False
    return bool(in_triton.fits(dtype, *matrices))


class TileWave(NamedTuple):
    """The tiles that a device computes at one time of a product that ends after some rows."""

    rows: int
    """Of a tile of the result."""
    columns: int
    """Of a tile."""
    tiles: int

    def waves(self, rows: int, columns: int) -> float:
        """Return how many times as long as one tile a product takes: a last wave of few tiles is computed in halves."""
        whole, rest = divmod(-(-rows // self.rows) * -(-columns // self.columns), self.tiles)
        if 0 < 2 * rest <= self.tiles:
            return whole + 0.5
        return whole + (rest > 0)


def wave_of(device: torch.device) -> TileWave | None:
    """Return the tiles that a device computes at one time of such a product; None on the CPU, where tiles do not matter."""
    return None if device.type == "cpu" or in_triton is None else TileWave(*in_triton.wave_of(device))


@dataclass(frozen=True, slots=True)
class Products:
    """Products over the first rows, or over all."""

    count: torch.Tensor | None = None
    """(1,), int32; None where all rows count."""

    def of_rows(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        *,
        out: torch.Tensor,
        add: bool = False,
        order: torch.Tensor | None = None,
    ) -> None:
        """Write the rows of `left @ right` that count, or add them to the present values.

        Args:
            left: (m, k), rows of unit stride.
            right: (k, n), same dtype, rows or columns of unit stride.
            out: (m, n), floating, rows of unit stride. Rows up to the next multiple of `ROW_ALIGNMENT` may be written,
                too; see `row_counts`.
            add: in the dtype of `out`.
            order: (m,), int64: the rows of `left` to take, where they do not come first. Not to add.
        """
        write = add_product if add else product
        if self.count is None:
            write(left, right, out=out)
        elif in_triton is not None and left.is_cuda:
            with on_device_of(left):
                in_triton.product_of_rows(left, right, self.count, out, add, order)
        else:
            rows = int(self.count)
            if rows >= 0:
                write(left[:rows] if order is None else left[order[:rows]], right, out=out[:rows])

    def over_rows(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        *,
        out: torch.Tensor,
        add: bool = False,
        order: torch.Tensor | None = None,
    ) -> None:
        """Write `left.t() @ right` over the rows that count, or add it to the present values.

        Args:
            left: (k, m), rows of unit stride; zero as far as `row_counts.ROW_ALIGNMENT` says, where rows of `right`
                are finite.
            right: (k, n), same dtype, rows of unit stride.
            out: (m, n), floating, rows of unit stride.
            add: in the dtype of `out`.
            order: (k,), int64: the rows of `right` to take, where they do not come first; others are not read then.
        """
        write = add_product if add else product
        if self.count is None:
            write(left.t(), right, out=out)
        elif in_triton is not None and left.is_cuda:
            with on_device_of(left):
                in_triton.product_over_rows(left, right, self.count, out, add, order)
        else:
            rows = int(self.count)
            if rows >= 0:
                write(left[:rows].t(), right[:rows] if order is None else right[order[:rows]], out=out)

    def sum_rows(self, matrix: torch.Tensor, *, out: torch.Tensor) -> None:
        """Write the sum of the rows that count.

        Args:
            matrix: (m, n), floating, rows of unit stride.
            out: (n,), of unit stride.
        """
        if self.count is not None and in_triton is not None and matrix.is_cuda:
            with on_device_of(matrix):
                in_triton.sum_of_rows(matrix, self.count, out)
            return
        wide = torch.float64 if matrix.dtype == torch.float64 else torch.float32
        rows = matrix.shape[0] if self.count is None else int(self.count)
        if rows >= 0:
            out.copy_(matrix[:rows].sum(dim=0, dtype=wide))


@dataclass(frozen=True, slots=True)
class PanelProducts:
    """Products over the first rows of panels, each made ready for all groups of them; a call computes one group."""

    count: torch.Tensor
    """(1,), int32: rows that count."""
    panels: Panels

    def of_rows(
        self, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor, order: torch.Tensor | None = None
    ) -> Callable[[int], None]:
        """Return a function that writes the rows of `left @ right` that count, panel below panel.

        Args:
            left: (m, k), rows of unit stride.
            right: (k, classes of all panels), same dtype, rows or columns of unit stride.
            out: (m, classes of a panel), floating, rows of unit stride. All that is between the panels may be written.
            order: (m,), int64: the rows of `left` to take, where they do not come first.
        """
        if in_triton is not None and left.is_cuda:
            launch = in_triton.products_of_rows(left, right, self.count, out, False, order, self.panels)
            return launching_there(left, launch)

        def write(group: int) -> None:
            for rows, classes in self.panels.slices(group):
                wide = out[rows, : classes.stop - classes.start]
                Products(self.count).of_rows(left, right[:, classes], out=wide, order=order)

        return write

    def across(
        self, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor, add: bool = False
    ) -> Callable[[int], None]:
        """Return a function that writes, or adds, the sum over panels of their rows that count times their part of `right`.

        Args:
            left: (m, classes of a panel), panel below panel. In the last one that is narrower, zero up to the next
                multiple of 64.
            right: (classes of all panels, n), same dtype, rows of unit stride.
            out: (m, n), floating, rows of unit stride. Rows up to the next multiple of `ROW_ALIGNMENT`
                may be written, too; see `row_counts`.
            add: in the dtype of `out`.
        """
        if in_triton is not None and left.is_cuda:
            launch = in_triton.products_of_rows(left, right, self.count, out, add, None, self.panels, deep=True)
            return launching_there(left, launch)

        def write(group: int) -> None:
            for number, (rows, classes) in enumerate(self.panels.slices(group)):
                wide = left[rows, : classes.stop - classes.start]
                Products(self.count).of_rows(wide, right[classes], out=out, add=add or number > 0)

        return write

    def over_rows(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        *,
        out: torch.Tensor,
        add: bool = False,
        order: torch.Tensor | None = None,
    ) -> Callable[[int], None]:
        """Return a function that writes, or adds, for each panel, `panel.t() @ right` over the rows that count.

        Args:
            left: (k, classes of a panel), panel below panel, each zero as far as `row_counts.ROW_ALIGNMENT` says.
            right: (k, n), same dtype, rows of unit stride.
            out: (classes of all panels, n), floating, rows of unit stride.
            add: in the dtype of `out`.
            order: (k,), int64: the rows of `right` to take, where they do not come first.
        """
        if in_triton is not None and left.is_cuda:
            launch = in_triton.products_over_rows(left, right, self.count, out, add, order, self.panels)
            return launching_there(left, launch)

        def write(group: int) -> None:
            for rows, classes in self.panels.slices(group):
                wide = left[rows, : classes.stop - classes.start]
                Products(self.count).over_rows(wide, right, out=out[classes], add=add, order=order)

        return write

    def sum_rows(self, matrix: torch.Tensor, *, out: torch.Tensor) -> Callable[[int], None]:
        """Return a function that writes, for each panel, the sum of its rows that count.

        Args:
            matrix: (m, classes of a panel), panel below panel.
            out: (classes of all panels,), of unit stride.
        """
        if in_triton is not None and matrix.is_cuda:
            return launching_there(matrix, in_triton.sums_of_rows(matrix, self.count, out, self.panels))

        def write(group: int) -> None:
            for rows, classes in self.panels.slices(group):
                Products(self.count).sum_rows(matrix[rows, : classes.stop - classes.start], out=out[classes])

        return write
