"""Run in a fresh interpreter, with Triton interpreted: print how far bounded products are from float64, as JSON.

With the word `few`, of a few sizes: a row, and a tile and one row more.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from unittest import mock

import torch

from megacpp_overlays.kernels.masked_products import products_triton as products
from megacpp_overlays.kernels.masked_products import token_selection_triton as rows
from megacpp_overlays.kernels.masked_products.panels import Panels
from megacpp_overlays.kernels.masked_products.row_counts import NOTHING, ROW_ALIGNMENT
from megacpp_overlays.kernels.masked_products.token_selection import select

ROWS, DEPTH, COLUMNS = 300, 72, 200
"""Several tiles of rows and of columns, none of them full; more than one step of depth."""
FEW = "few" in sys.argv
COUNTS = (1, 129) if FEW else (0, 1, 64, 128, 129, 300)
KINDS = ((False, True), (True, False)) if FEW else tuple(product((False, True), (False, True)))
"""Whether the result is in float32, and whether it is added to the numbers that are there."""
PROGRAMS = (3,) if FEW else (3, 8)
PANELS = ((129, 129),) if FEW else ((0, 0), (1, 1), (100, 128), (129, 129), (200, 300), (520, 520))
"""Rows that count, and rows that are laid for each panel."""
MOST = (2,) if FEW else (0, 2)
DEPTHS = (72,) if FEW else (72, 256)
OLD = 7.0
"""The numbers that a result holds before."""


def far(seen: torch.Tensor, true: torch.Tensor) -> float:
    """Return the error in the Euclidean norm, relative to the truth."""
    return float((seen.double() - true).norm()) / (float(true.norm()) or 1.0)


def compute(count: int, wide: bool, add: bool) -> dict[str, float]:
    """Return the errors of three products like those of a backward pass.

    In float16: of bfloat16 the interpreter makes no product.
    """
    generator = torch.Generator().manual_seed(count)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).half()

    hidden, weight, gradient = values(ROWS, DEPTH), values(COLUMNS, DEPTH), values(ROWS, COLUMNS + 8)[:, :COLUMNS]
    gradient[count:] = 0
    hidden[count + 64 :] = float("nan")  # is not read
    number = torch.tensor([count], dtype=torch.int32)
    out = torch.float32 if wide else torch.float16

    def room(*shape: int) -> torch.Tensor:
        return torch.full((shape[0], shape[1] + 8), OLD, dtype=out)[:, : shape[1]]

    some = [each[:count].double() for each in (hidden, gradient)]
    old = OLD if add else 0.0
    logits, of_hidden, of_weight = room(ROWS, COLUMNS), room(ROWS, DEPTH), room(COLUMNS, DEPTH)
    products.product_of_rows(hidden, weight.t(), number, logits, add)
    products.product_of_rows(gradient, weight, number, of_hidden, add)
    products.product_over_rows(gradient, hidden, number, of_weight, add)
    end = -(-count // 128) * 128
    return {
        "logits": far(logits[:count], some[0] @ weight.double().t() + old),
        "of hidden": far(of_hidden[:count], some[1] @ weight.double() + old),
        "of weight": far(of_weight, some[1].t() @ some[0] + old),
        "rows after the last tile": float((of_hidden[end:] != OLD).sum() + (logits[end:] != OLD).sum()),
    }


def by_few(count: int, programs: int) -> dict[str, float]:
    """Return the errors of all products where a program computes several tiles, and the last ones may come in halves."""
    with mock.patch.object(products, "_programs", return_value=programs):
        return {**compute(count, True, True), **in_panels(count, count, 0, False)}


def chosen(count: int, depth: int) -> dict[str, float]:
    """Return the errors of products that take some rows from anywhere, while others are not numbers."""
    generator = torch.Generator().manual_seed(count)
    order = torch.randperm(ROWS, generator=generator)
    hidden, weight = (torch.randn(rows, depth, generator=generator).half() for rows in (ROWS, COLUMNS))
    gradient = torch.randn(ROWS, COLUMNS, generator=generator).half()
    gradient[count:] = 0
    hidden[order[count:]] = torch.nan
    number = torch.tensor([count], dtype=torch.int32)
    some = hidden[order[:count]].double()
    logits, of_weight = torch.full((ROWS, COLUMNS), OLD), torch.full((COLUMNS, depth), OLD)
    products.product_of_rows(hidden, weight.t(), number, logits, False, order)
    products.product_over_rows(gradient, hidden, number, of_weight, True, order)
    return {
        "logits": far(logits[:count], some @ weight.double().t()),
        "of weight": far(of_weight, gradient[:count].double().t() @ some + OLD),
    }


def moves(count: int, columns: int) -> list[bool]:
    """Return whether the rows of some selected tokens come first, and whether they go back."""
    generator = torch.Generator().manual_seed(count)
    wanted = torch.zeros(ROWS, dtype=torch.bool)
    wanted[torch.randperm(ROWS, generator=generator)[:count]] = True
    wide = torch.randn(ROWS, columns + 8, generator=generator)
    beside, matrix = wide[:, columns:].clone(), wide[:, :columns]
    expected = matrix[wanted]
    selection = select(wanted)
    places = [torch.equal(*pair) for pair in zip(rows.select(wanted), selection, strict=True)]
    spoiled = torch.where(wanted.unsqueeze(1), matrix, torch.nan)
    first = torch.full_like(spoiled, OLD)
    rows.first(spoiled, selection.order, selection.count, ROW_ALIGNMENT, first)
    apart = (
        torch.equal(first[:count], expected)
        and not first[count : max(1, -(-count // ROW_ALIGNMENT)) * ROW_ALIGNMENT].any()
    )
    rows.bring_first(matrix, selection.order, selection.count)
    came = torch.equal(matrix[:count], expected)
    matrix[count:] = torch.nan
    back = rows.put_back_apart(matrix, selection.place, selection.count, torch.float16)
    rows.put_back(matrix, selection.order, selection.count)
    went = torch.equal(matrix[wanted], expected) and not matrix[~wanted].any()
    return [*places, apart, came, went, torch.equal(back, matrix.half()), torch.equal(wide[:, columns:], beside)]


PANEL_ROWS, PANEL_WIDTH, PANEL_CLASSES = 520, 256, 256 * 4 + 72
"""Five panels, the last of them narrower; four of them fit into the memory where one tile of rows counts."""


def in_panels(count: int, laid: int, most: int, by_order: bool) -> dict[str, float]:
    """Return the errors of all products over panels, group after group, with `laid` rows for each panel."""
    generator = torch.Generator().manual_seed(count)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).half()

    number = torch.tensor([count], dtype=torch.int32)
    panels = Panels.cut(PANEL_CLASSES, PANEL_WIDTH, PANEL_ROWS, torch.tensor([laid], dtype=torch.int32), most)
    assert panels is not None
    order = torch.randperm(PANEL_ROWS, generator=generator) if by_order else None
    hidden, weight = values(PANEL_ROWS, DEPTH), values(PANEL_CLASSES, DEPTH)
    if order is None:
        hidden[-(-count // 64) * 64 :] = torch.nan
        hidden[count:] = hidden[count:].nan_to_num(0.0)
    else:
        hidden[order[count:]] = torch.nan
    some = (hidden if order is None else hidden[order])[:count].double()
    turned = values(count, PANEL_CLASSES)
    block = torch.full((PANEL_ROWS, PANEL_WIDTH), OLD, dtype=torch.float16)
    logits = torch.full((count, PANEL_CLASSES), torch.nan)
    of_hidden, of_weight = torch.full((PANEL_ROWS, DEPTH), OLD), torch.full((PANEL_CLASSES, DEPTH), OLD)
    total = torch.full((PANEL_CLASSES,), OLD)
    multiply = products.products_of_rows(hidden, weight.t(), number, block, False, order, panels)
    across = [
        products.products_of_rows(block, weight, number, of_hidden, add, None, panels, deep=True)
        for add in (False, True)
    ]
    over = products.products_over_rows(block, hidden, number, of_weight, True, order, panels)
    add_up = products.sums_of_rows(block, number, total, panels)
    seen = []
    for group in range(panels.number):
        multiply(group)
        for place, classes in panels.slices(group):
            width = classes.stop - classes.start
            logits[:, classes] = block[place, :width][:count].float()
            block[place, :width] = 0
            block[place, :width][:count] = turned[:, classes]
            seen += range(classes.start, classes.stop)
        across[group > 0](group)
        over(group)
        add_up(group)
    end = -(-max(count, 1) // 128) * 128
    return {
        "logits": far(logits, some @ weight.double().t()),
        "of hidden": far(of_hidden[:count], turned.double() @ weight.double()),
        "of weight": far(of_weight, turned.double().t() @ some + OLD),
        "sums": far(total, turned.double().sum(dim=0)),
        "classes once": float(sorted(seen) != list(range(PANEL_CLASSES))),
        "rows after the last tile": float((of_hidden[end:] != OLD).sum()),
    }


def nothing(laid: int, by_order: bool) -> int:
    """Return how many numbers products, copies and moves write where they are to do nothing."""
    number, order = torch.tensor([NOTHING], dtype=torch.int32), torch.arange(PANEL_ROWS).flip(0)
    by = order if by_order else None
    panels = Panels.cut(PANEL_CLASSES, PANEL_WIDTH, PANEL_ROWS, torch.tensor([laid], dtype=torch.int32))
    assert panels is not None
    hidden, weight = (torch.ones(rows, DEPTH).half() for rows in (PANEL_ROWS, PANEL_CLASSES))
    block, first = (torch.full((PANEL_ROWS, each), OLD, dtype=torch.float16) for each in (PANEL_WIDTH, DEPTH))
    of_hidden, of_weight = torch.full((PANEL_ROWS, DEPTH), OLD), torch.full((PANEL_CLASSES, DEPTH), OLD)
    total, moved = torch.full((PANEL_CLASSES,), OLD), torch.arange(PANEL_ROWS * 8.0).view(PANEL_ROWS, 8)
    for add in (False, True):
        launches = [
            products.products_of_rows(hidden, weight.t(), number, block, False, by, panels),
            products.products_of_rows(block, weight, number, of_hidden, add, None, panels, deep=True),
            products.products_over_rows(block, hidden, number, of_weight, add, by, panels),
            products.sums_of_rows(block, number, total, panels),
        ]
        for group in range(panels.number):
            for launch in launches:
                launch(group)
        products.product_of_rows(hidden, weight[:PANEL_WIDTH].t(), number, block, False, by)
        products.product_over_rows(block, hidden, number, of_weight[:PANEL_WIDTH], add, by)
    products.sum_of_rows(block, number, total[:PANEL_WIDTH])
    rows.first(hidden, order, number, ROW_ALIGNMENT, first)
    before = moved.clone()
    rows.bring_first(moved, order, number)
    rows.bring_first(moved, order, number, panels)
    changed = sum(int((each != OLD).sum()) for each in (block, first, of_hidden, of_weight, total))
    return changed + int((moved != before).sum())


def sums(count: int) -> float:
    """Return how far the sum of the first rows is from that in float64."""
    generator = torch.Generator().manual_seed(count)
    matrix = torch.randn(ROWS, COLUMNS + 8, generator=generator)[:, :COLUMNS]
    matrix[count:] = torch.nan
    out = torch.full((COLUMNS,), OLD)
    products.sum_of_rows(matrix, torch.tensor([count], dtype=torch.int32), out)
    return far(out, matrix[:count].double().sum(dim=0))


def main() -> None:
    """Answer."""
    found = {
        "products": {
            f"{count}{' wide' * wide}{' add' * add}": compute(count, wide, add)
            for count, (wide, add) in product(COUNTS, KINDS)
        },
        "few programs": {
            f"{count}, {programs}": by_few(count, programs)
            for count in COUNTS[-1 if FEW else 0 :]
            for programs in PROGRAMS
        },
        "chosen": {f"{count}, {depth}": chosen(count, depth) for count in COUNTS for depth in DEPTHS},
        "panels": {
            f"{count} of {laid}, {most or 'all'}{' by order' * by_order}": in_panels(count, laid, most, by_order)
            for count, laid in PANELS
            for most in MOST
            for by_order in (False, True)
        },
        "nothing": {
            f"{laid}{' by order' * by_order}": nothing(laid, by_order)
            for laid in (NOTHING, 100)[FEW:]
            for by_order in (False, True)
        },
        "sums": {str(count): sums(count) for count in COUNTS},
        "moves": {f"{count}, {columns}": moves(count, columns) for count in COUNTS for columns in (COLUMNS, 128)},
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
