"""Run in a fresh interpreter: compile bounded products for Hopper, which this host need not have; print JSON."""

from __future__ import annotations

import json
import sys
from itertools import product
from typing import Any

import torch
from index_scores_targets import Device, machine_code_of, obstacle, order_of


def needs_of(kernel: Any, name: str) -> dict[str, Any]:
    """Return the needs of a compiled program."""
    asm = kernel.asm["ptx"]
    return {
        "kernel": name,
        "shared": kernel.metadata.shared,
        **machine_code_of(kernel),
        "wgmma": "wgmma.mma_async" in asm,
        "bulk copies": "cp.async.bulk.tensor" in asm,
        "adds in memory": "cp.reduce.async.bulk.tensor" in asm,
        **order_of(kernel),
    }


def main() -> None:
    """Answer for compute capability 9.0."""
    if reason := obstacle():
        sys.stdout.write(json.dumps({"obstacle": reason}))
        return
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from megacpp_overlays.kernels.masked_products import launches
    from megacpp_overlays.kernels.masked_products import products_triton as products
    from megacpp_overlays.kernels.masked_products import token_selection_triton as rows
    from megacpp_overlays.kernels.masked_products.panels import Panels

    found: list[dict[str, Any]] = []
    run = JITFunction.run

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(needs_of(run(function, *args, grid=grid, warmup=True, **options), function.__name__))

    JITFunction.run = compile_only
    launches.begins_early = lambda _: True
    driver.set_active(Device(90))
    products._largest = lambda _: products._LARGE
    count = torch.ones(1, dtype=torch.int32)
    panels = Panels.cut(512, 256, 256, count)
    wide_weight = torch.zeros(512, 256, dtype=torch.bfloat16)
    for dtype, wide in product((torch.bfloat16, torch.float16), (False, True)):
        matrix, out = torch.zeros(256, 256, dtype=dtype), torch.zeros(256, 256, dtype=torch.float32 if wide else dtype)
        products.product_of_rows(matrix, matrix.t(), count, out, False)
        products.product_of_rows(matrix, matrix, count, out, False)
        products.product_of_rows(matrix, matrix, count, out, True)
        weight = wide_weight.to(dtype)
        products.products_of_rows(matrix, weight, count, out, False, None, panels, deep=True)(1)
        products.products_of_rows(matrix, weight, count, out, True, None, panels, deep=True)(1)
        products.product_over_rows(matrix, matrix, count, out, False)
        products.product_over_rows(matrix, matrix, count, out, True)
        rows.bring_first(out, torch.zeros(256, dtype=torch.int64), count)
        order = torch.zeros(256, dtype=torch.int64)
        products.product_of_rows(matrix, matrix.t(), count, out, False, order)
        products.product_over_rows(matrix, matrix, count, out, False, order)
        products.product_over_rows(matrix, matrix, count, out, True, order)
        rows.put_back(out, order, count)
        rows.first(matrix, order, count, 256, matrix.clone())
        rows.put_back_apart(out, order, count, dtype)
        products.sum_of_rows(matrix, count, torch.zeros(256))
    rows.select(torch.zeros(2000, dtype=torch.bool))
    sys.stdout.write(json.dumps({"programs": found}))


if __name__ == "__main__":
    main()
