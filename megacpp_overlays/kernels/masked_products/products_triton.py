"""Products whose number of rows only the device knows, in Triton; see `products`.

A program takes tile after tile of the result, as many as the rows make, and a tile is summed in one order by one
program: the same rows give the same bits. Tiles travel through tensor descriptors, which are the bulk copies of
Hopper and Blackwell and plain reads elsewhere.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from megacpp_overlays.kernels.masked_products import device_code
from megacpp_overlays.kernels.masked_products.launches import Launches
from megacpp_overlays.kernels.masked_products.panels import Panels

_GROUP = 16
"""Tiles of rows in a strip, whose programs run at one time and share their operands in the L2 cache.

With 132 programs and tiles of 128 rows and 256 columns, 16 of them read least: about as many rows as columns.
"""
_SUMMED_ROWS, _SUMMED_COLUMNS = 64, 64
"""Rows and columns that a program adds up at a time; its lanes are summed once, at the end."""
_ALIGNMENT = 16
"""Bytes, of a descriptor's start and of its rows."""


class Tile(NamedTuple):
    """How the programs of a product work."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int


_LARGE = Tile(128, 256, 64, 3, 8)
_SMALL = Tile(128, 128, 32, 3, 8)
_SHARED_BY_LARGE = 180_264
"""Bytes, compiled for compute capability 9.0 with triton 3.6.0, without a spilled register."""


def fits(dtype: torch.dtype, *matrices: torch.Tensor) -> bool:
    """Return whether descriptors can address these matrices, and copies of them without padding, in this dtype too."""
    return all(
        each.stride(1) == 1
        and each.data_ptr() % _ALIGNMENT == 0
        and each.stride(0) * each.element_size() % _ALIGNMENT == 0
        and each.shape[1] * min(dtype.itemsize, each.element_size()) % _ALIGNMENT == 0
        for each in matrices
    )


def wave_of(device: torch.device) -> tuple[int, int, int]:
    """Return the rows and columns of a tile, and how many tiles are computed at one time."""
    tile = _largest(device)
    return tile.rows, tile.columns, _multiprocessors(device)


def product_of_rows(
    left: torch.Tensor,
    right: torch.Tensor,
    count: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    order: torch.Tensor | None = None,
) -> None:
    """See `products.Products.of_rows`."""
    if left.shape[0] and right.shape[1]:
        products_of_rows(left, right, count, out, add, order)(0)


def products_of_rows(
    left: torch.Tensor,
    right: torch.Tensor,
    count: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    order: torch.Tensor | None = None,
    panels: Panels | None = None,
    *,
    deep: bool = False,
) -> Launches:
    """Return the launches of such a product: one for each group of panels if there are any, else one, as group 0.

    Args:
        left: see `products.Products.of_rows`, as are those that follow; `right` is that of all panels.
        right: (k, n), not empty.
        count: (1,), int32.
        out: (m, n).
        add: in the dtype of `out`.
        order: (m,), int64.
        panels: of `right`.
        deep: whether panels are on the left, one below the other, and their products are added up; else in the result.
    """
    rows, depth = left.shape
    if panels is not None and deep:
        depth = panels.classes
    columns = right.shape[1]
    tile = _largest(left.device)
    transposed = right.stride(0) == 1
    grid = (_programs(rows, columns, tile, left.device), 1)

    def part(width: int) -> TensorDescriptor:
        return _descriptor(right.t(), width, tile.depth) if transposed else _descriptor(right, tile.depth, width)

    arguments = {
        "right": part(tile.columns), "out": _descriptor(out, tile.rows, tile.columns // 4),
        "count": count, "columns": columns, "depth": depth, "programs": grid[0],
        **_cut(panels, count, rows, depth if deep else columns),
        "TRANSPOSED": transposed, "GROUP": _GROUP, "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth,
    }  # fmt: skip
    if order is not None:
        arguments |= {"left": left, "stride": left.stride(0), "order": order, "WHOLE": depth % tile.depth == 0}
        return _launches(device_code.of_chosen_rows, grid, arguments, left.device, tile)
    arguments |= {
        "left": _descriptor(left, tile.rows, tile.depth), "half": part(tile.columns // 2), **_adding(out, add), "DEEP": deep
    }  # fmt: skip
    return _launches(device_code.of_rows, grid, arguments, left.device, tile)


def product_over_rows(
    left: torch.Tensor,
    right: torch.Tensor,
    count: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    order: torch.Tensor | None = None,
) -> None:
    """See `products.Products.over_rows`."""
    if left.shape[0] and out.numel():
        products_over_rows(left, right, count, out, add, order)(0)
    elif not add:
        out.zero_()


def products_over_rows(
    left: torch.Tensor,
    right: torch.Tensor,
    count: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    order: torch.Tensor | None = None,
    panels: Panels | None = None,
) -> Launches:
    """Return the launches of such a product: one for each group of panels if there are any, else one, as group 0.

    Args:
        left: see `products.Products.over_rows`, as are those that follow.
        right: (k, n), not empty.
        count: (1,), int32.
        out: (m, n), that of all panels.
        add: in the dtype of `out`.
        order: (k,), int64.
        panels: on the left, one below the other; in the result, one after the other.
    """
    height, width = out.shape
    tile = _largest(left.device)
    grid = (_programs(height, width, tile, left.device), 1)
    arguments = {
        "left": _descriptor(left, tile.depth, tile.rows), "out": _descriptor(out, tile.rows, tile.columns // 4),
        "count": count, "height": height, "across": width, "programs": grid[0],
        **_cut(panels, count, left.shape[0], height), **_adding(out, add),
        "GROUP": _GROUP, "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth,
    }  # fmt: skip
    if order is not None:
        arguments |= {"right": right, "stride": right.stride(0), "order": order, "WHOLE": width % tile.columns == 0}
        return _launches(device_code.over_chosen_rows, grid, arguments, left.device, tile)
    arguments |= {
        "right": _descriptor(right, tile.depth, tile.columns), "half": _descriptor(right, tile.depth, tile.columns // 2)
    }  # fmt: skip
    return _launches(device_code.over_rows, grid, arguments, left.device, tile)


def sum_of_rows(matrix: torch.Tensor, count: torch.Tensor, out: torch.Tensor) -> None:
    """See `products.Products.sum_rows`."""
    if matrix.numel():
        sums_of_rows(matrix, count, out)(0)
    else:
        out.zero_()


def sums_of_rows(
    matrix: torch.Tensor, count: torch.Tensor, out: torch.Tensor, panels: Panels | None = None
) -> Launches:
    """Return the launches of such a sum: one for each group of panels if there are any, else one, as group 0.

    Args:
        matrix: see `products.Products.sum_rows`; panels are one below the other.
        count: (1,), int32.
        out: (n,), that of all panels.
        panels: of the matrix.
    """
    columns = out.shape[0]
    arguments = {
        "matrix": matrix, "stride": matrix.stride(0), "count": count, "out": out, "columns": columns,
        **_cut(panels, count, matrix.shape[0], columns),
        "ROWS": _SUMMED_ROWS, "COLUMNS": _SUMMED_COLUMNS,
    }  # fmt: skip
    return Launches(
        device_code.sum_of_rows,
        (triton.cdiv(columns, _SUMMED_COLUMNS), 1),
        "group",
        arguments,
        matrix.device,
        early=True,
        num_warps=8,
    )


def _launches(
    kernel: Any, grid: tuple[int, int], arguments: dict[str, Any], device: torch.device, tile: Tile
) -> Launches:
    return Launches(kernel, grid, "group", arguments, device, early=True, num_stages=tile.stages, num_warps=tile.warps)


def _cut(panels: Panels | None, count: torch.Tensor, rows: int, classes: int) -> dict[str, torch.Tensor | int]:
    """Return the programs' arguments that describe panels; without panels, those of a single one."""
    if panels is None:
        return {"planned_rows": count, "rows": rows, "width": classes, "panels": 1, "group_limit": 1}
    return {**panels.arguments, "rows": rows}


def _adding(out: torch.Tensor, add: bool) -> dict[str, bool]:
    """Return how programs add to a result: float32 where it lies, without reading it, as Triton's interpreter cannot."""
    return {
        "ADD": add,
        "THERE": add and out.dtype == torch.float32 and isinstance(device_code.of_rows, triton.JITFunction),
    }


@functools.cache
def _largest(device: torch.device) -> Tile:
    if device.type != "cuda":
        return _SMALL
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return _LARGE if shared >= _SHARED_BY_LARGE else _SMALL


def _programs(rows: int, columns: int, tile: Tile, device: torch.device) -> int:
    tiles: int = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    if device.type != "cuda":
        return tiles
    return min(2 * tiles, _multiprocessors(device))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    number: int = torch.cuda.get_device_properties(device).multi_processor_count
    return number


def _descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])
