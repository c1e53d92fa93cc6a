"""The page of attention over chosen keys, and its plot. Standard library only, so that any host can make them again.

python benchmarks/sparse_attention/page.py FILE.json [--write FILE.md] [--plot FILE.svg]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import report
from sparse_attention.plot import svg


def markdown(found: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "Written by `benchmarks/sparse_attention/run.py`, in one run. bfloat16, one batch element; every query chooses its keys at",
        "random. Medians of contestants that take turns; memory is the peak above the memory held before the call, results",
        "included. TFLOP/s count two products forward and five backward. `Megatron, none` is the default backend,",
        "`Megatron, tilelang` its other one, which takes 576/512 alone. FlashMLA and TileLang's example, where they were run, have a",
        "forward pass alone. FP8 keys, where they were run, have a scale each. Bare products are cuBLAS on dense tensors of the same",
        "sizes; the gather copies every chosen key once. Errors are of 32 queries against float64, norm over norm.",
        "[Limits of the kernels](sparse_attention_counters.md).",
        "",
        f"![TFLOP/s of both passes, for each shape]({found.get('plot', 'sparse_attention.svg')})",
    ]
    for each in found["shapes"]:
        lines += ["", f"## {each['name']}", ""]
        head = ("", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "extra MiB", "error: output", "query", "key")
        lines += report.table(head, [row(name, one, each) for name, one in each["contestants"].items()])
    return report.whole("Attention over chosen keys", found, lines)


def row(name: str, one: dict[str, Any] | None, each: dict[str, Any]) -> list[str]:
    """Return a line of a table."""
    if one is None:
        return [name, "does not fit", *("-" for _ in range(7))]
    forward, *rest = one["stages"]
    backward = rest[0] if rest else None
    found = one.get("errors", {})
    return [
        name,
        report.ms(forward),
        report.number(each["forward_flops"] / forward / 1e9 if rest or found else None, ".0f"),
        report.ms(backward),
        report.number(each["backward_flops"] / backward / 1e9 if backward else None, ".0f"),
        report.number(one.get("mib"), ".0f"),
        *(report.number(found.get(tensor), ".1e") for tensor in ("output", "of query", "of key")),
    ]


if __name__ == "__main__":
    report.main("Make page and plot of a kept run.", markdown, svg)
