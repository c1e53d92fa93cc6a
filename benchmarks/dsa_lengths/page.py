"""The page and the plot of the measurements of run.py. Standard library only, so that any host can make them again.

python benchmarks/dsa_lengths/page.py FILE.json [--write FILE.md] [--plot FILE.svg]
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Iterator

from dsa_lengths.plot import TITLE, svg
from report import NO_FIT, Found, main, ms, number, table, whole

COLUMNS = ("", "tokens", "heads", "forward and backward, ms", "peak, GiB", "steps", "first loss", "last")


def markdown(found: Found) -> str:
    """Return the page."""
    return whole(TITLE, found, section(found))


def section(found: Found) -> Iterator[str]:
    """Yield the description of the model, a table of times and memory, and the growth of memory."""
    size = found["size"]
    yield from [
        "Written by `benchmarks/dsa_lengths/run.py`. A HybridModel of Megatron with one layer of absorbed latent attention that is sparse, hidden size "
        f"{size['hidden']}, {size['latent'] + size['rotary']}/{size['latent']} channels,",
        f"an indexer of {size['indexer_heads']} heads of {size['indexer']} channels that learns by its sparse loss, {size['chosen']} keys chosen; "
        "one document of all tokens a step. Stock is megatron-core",
        "without an overlay and with `dsa_kernel_backend=none`, or `tilelang` where the row says so. Milliseconds are medians of the later half of the steps; memory is above weights and optimizer.",
        "",
        f"![Time and memory of a step by length]({found.get('plot', 'dsa_lengths.svg')})",
        "",
        *table(COLUMNS, rows(found["runs"])),
    ]
    if (said := growth(found["runs"])) is not None:
        yield from ["", said]


def rows(runs: list[Found]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each run."""
    for each in runs:
        losses = each["losses"]
        ends = (f"{losses[0]:.4f}", f"{losses[-1]:.4f}") if losses else ("", "")
        time = NO_FIT if each["ms"] is None and not losses else ms(each["ms"])
        memory = "" if each["mib"] is None else number(each["mib"] / 1024, ".2f")
        yield each["way"], str(each["tokens"]), str(each["heads"]), time, memory, str(each["steps"]), *ends


def growth(runs: list[Found]) -> str | None:
    """Return in a sentence with which power of the length memory grows under overlays, by least squares of logarithms."""
    heads = min((each["heads"] for each in runs), default=0)
    points = [
        (math.log(each["tokens"]), math.log(each["mib"]))
        for each in runs
        if each["way"] == "overlays" and each["heads"] == heads and each["mib"] is not None
    ]
    if len(points) < 3:
        return None
    mean_x, mean_y = (sum(each) / len(points) for each in zip(*points, strict=True))
    power = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return (
        f"Under overlays memory grows with the {power:.2f}th power of the length, over {len(points)} lengths from "
        f"{round(math.exp(points[0][0]))} to {round(math.exp(points[-1][0]))}."
    )


if __name__ == "__main__":
    main("Page and plot of a layer of DeepSeek sparse attention at several lengths.", markdown, svg)
