"""The page and the plot of the measurements of linear_cross_entropy_step.py. Standard library only, so that any host can make it again.

python benchmarks/linear_cross_entropy_step/page.py FILE.json [--write FILE.md] [--plot FILE.svg]
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Iterator

from linear_cross_entropy_step.plot import svg
from report import NO_FIT, Found, main, ms, table, whole


def markdown(found: Found) -> str:
    """Return the page."""
    return whole("A training step and its loss", found, section(found))


def section(found: Found) -> Iterator[str]:
    """Yield the lines that another page can take over, without title, host and problems."""
    size = found["size"]
    yield from [
        "Written by `benchmarks/linear_cross_entropy_step/run.py`. The demo's model, scaled: GPTModel with the local spec in",
        f"Float16Module, {size['layers']} attention layers of torch's scaled_dot_product_attention, hidden {size['hidden']},",
        f"{found.get('parameters', 0) / 1e9:.2f} billion parameters, vocabulary {size['vocabulary']}, {size['batch']} samples"
        f" of {size['sequence']} tokens, a third of them",
        "masked, bfloat16, torch's fused AdamW on bfloat16 parameters. All ways share one model and take turns; times are",
        "medians in milliseconds. No overlay is active: Megatron and Liger are as they are. `output layer and loss` is the",
        "time of forward and backward of these two alone.",
        "",
        "![Milliseconds of a step of each way](linear_cross_entropy_step.svg)",
    ]
    if "times" in found:
        yield from ["", *table(STEP, step_rows(found))]
    if "agreement" in found:
        yield from [
            "",
            "The same parameters and data; errors of the gradients of hidden states and output weight, norm over",
        ]
        yield from ["norm, against float64 on the same hidden states:", "", *table(AGREEMENT, agreement_rows(found))]
    if "trajectory" in found:
        count = len(next(iter(found["trajectory"].values())))
        head = ("loss of step", *(str(step + 1) for step in range(count)))
        rows = ((way, *(f"{loss:.4f}" for loss in losses)) for way, losses in found["trajectory"].items())
        yield from ["", "From the same parameters, on one batch:", "", *table(head, rows)]


STEP = ("", "forward", "backward", "optimizer", "step", "against unfused", "output layer and loss",
        "peak of the step, MiB", "less than unfused, MiB", "largest micro-batch")  # fmt: skip
AGREEMENT = ("", "loss", "apart from float64", "dX error", "dW error", "gradients")
WRONG = 0.05
"""An error that no rounding of bfloat16 explains."""


def step_rows(found: Found) -> Iterator[tuple[str, ...]]:
    """Yield one row for each way."""
    ways = [name for name in found["times"] if not name.endswith(", alone")]
    base = found["times"][ways[0]]
    for way in ways:
        row, alone = found["times"][way], found["times"][f"{way}, alone"]
        if not row:
            yield way, NO_FIT, *"-" * (len(STEP) - 2)
            continue
        ratio = f"{base['ms'] / row['ms']:.3f} x" if base else "-"
        part = ms(alone["ms"]) if alone else "-"
        yield (
            way,
            *map(ms, row["stages"]),
            ms(row["ms"]),
            ratio,
            part,
            *memory_cells(found, way, ways[0]),
            largest(found, way),
        )


def memory_cells(found: Found, way: str, first: str) -> tuple[str, str]:
    """Return the peak of a step, and by how much it is below that of the first way."""
    peaks = {
        name: row["held_mib"] + row["step_mib"]
        for name, row in found.get("memory", {}).items()
        if row["step_mib"] is not None
    }
    if way not in peaks:
        return "-", "-"
    return f"{peaks[way]:.0f}", f"{peaks[first] - peaks[way]:.0f}" if first in peaks and way != first else "-"


def largest(found: Found, way: str) -> str:
    """Return the largest micro-batch that fits, as far as it was looked for."""
    row = found.get("largest", {}).get(way)
    if row is None:
        return "-"
    return str(row["batch"]) if row["fails"] == row["batch"] + 1 else f">= {row['batch']}"


def agreement_rows(found: Found) -> Iterator[tuple[str, ...]]:
    """Yield one row for each way, and the truth."""
    true = found["agreement"]["float64"]["loss"]
    for way, row in found["agreement"].items():
        known = [row[name] for name in ("dX", "dW") if name in row]
        errors = [f"{value:.1e}" for value in known] or ["-", "-"]
        judged = "-" if not known else "right" if max(known) < WRONG else "**wrong**"
        yield way, f"{row['loss']:.6f}", f"{abs(row['loss'] - true):.1e}", *errors, judged


if __name__ == "__main__":
    main("Page and plot of the benchmark of a whole training step.", markdown, svg)
