"""The page and the plot of the measurements of linear_cross_entropy_ranks.py. Standard library only, so that any host can make it again.

python benchmarks/linear_cross_entropy_ranks/page.py FILE.json [--write FILE.md] [--plot FILE.svg]
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Iterator

from linear_cross_entropy_ranks.plot import svg
from linear_cross_entropy_ranks.times import floor
from report import Found, main, ms, table, whole


def markdown(found: Found) -> str:
    """Return the page."""
    return whole("Vocabulary-parallel linear cross entropy", found, section(found))


def section(found: Found) -> list[str]:
    """Return the lines that another page can take over, without title, host and problems."""
    shape = found["shape"]
    lines = [
        "Written by `benchmarks/linear_cross_entropy_ranks/run.py`, in one launch for each size of the group.",
        f"{shape['tokens']} tokens, hidden {shape['hidden']}, vocabulary {shape['vocabulary']} of all ranks together,",
        f'{found["dtype"]}, `reduction="none"`, a random mask of one half, 5% of the targets ignored; {found["backend"]},',
        "NVLink multicast off. Times are medians of forward and backward of the slowest rank, in milliseconds; all",
        "contestants take turns, and a call begins when all ranks are there. `floor` is the time of the products of one",
        "shard that the way cannot avoid, four with recomputed logits and three with kept ones, measured in the same",
        "race on all ranks at once; they compute all tokens, so ways that skip the masked ones can be quicker. `one shard by",
        "itself` is the work of a rank without any collective. Memory is the peak above inputs, losses and gradients.",
        "",
        "![Milliseconds of each way and of the products of a shard](linear_cross_entropy_ranks.svg)",
    ]
    for size, each in found["sizes"].items():
        lines += ["", f"## TP={size}"]
        lines += of_size(int(size), each)
    for each in found["skipped"]:
        lines += ["", f"## TP={each['size']}", "", f"Not measured: {each['reason']}."]
    return lines


def of_size(size: int, each: Found) -> Iterator[str]:
    """Yield the tables of one launch."""
    if "times" in each:
        yield from ["", *table(TIMES, time_rows(size, each["times"]))]
    if "collectives" in each:
        cells = [(row["name"], f"{row['mib']:.3g}", ms(row["ms"])) for row in each["collectives"]]
        yield from ["", *table(("collective by itself", "MiB", "ms"), cells)]
        if "times" in each:
            yield from ["", *overlap(size, each)]
    if "graphs" in each:
        yield from ["", "Captured in a CUDA graph with its collectives, replayed on other inputs:", ""]
        yield from table(GRAPHS, graph_rows(each["graphs"]))
    if "correctness" in each:
        yield from ["", "Errors are norms of differences over norms; of the worst rank.", ""]
        yield from table(ERRORS, error_rows(each["correctness"]))
    if "options" in each:
        yield from ["", "Mean loss with bias, class weights, label smoothing, softcap and z-loss:", ""]
        cells = [
            (row["name"], *(small(row["one_gpu"][name]) for name in ("loss", "dX", "dW", "db")))
            for row in each["options"]
        ]
        yield from table(("against one GPU", "loss", "dX", "dW", "dbias"), cells)


SEQUENCE = ", sequence parallel"
SHARD = "one shard by itself, "
TIMES = ("", "forward", "backward", "both", "floor", "over floor", "TP=1 over this", "extra MiB")
GRAPHS = ("", "eager ms", "replayed ms", "same bits as eager")
ERRORS = ("", *(f"{name} against float64" for name in ("loss", "dX", "dW")),
          *(f"{name} against one GPU" for name in ("loss", "dX", "dW")), "loss the same bits on all", "same bits again")  # fmt: skip


def time_rows(size: int, rows: list[Found]) -> Iterator[tuple[str, ...]]:
    """Yield one row for each way, and those of the products."""
    by_name = {row["name"]: row for row in rows}
    for row in rows:
        name = row["name"]
        if name.startswith("products"):
            first, *rest = row["stages"]
            yield name, ms(first), ms(sum(rest)), ms(row["ms"]), "-", "-", "-", "-"
            continue
        least = floor(name, by_name)
        alone = by_name[f"TP=1, {method_of(name)}"]["ms"]
        gain = "-" if name.startswith(("TP=1,", "one shard")) else f"{alone / row['ms']:.2f} x of {size}"
        extra = "-" if row.get("extra_mib") is None else f"{row['extra_mib']:.0f}"
        yield name, *map(ms, row["stages"]), ms(row["ms"]), ms(least), f"{row['ms'] / least:.3f} x", gain, extra


def method_of(name: str) -> str:
    """Return how a rank of a way does its part."""
    return name.partition(", ")[2].removesuffix(SEQUENCE)


def overlap(size: int, each: Found) -> Iterator[str]:
    """Yield in words the cost of the collectives, compared with their time by themselves."""
    whole = {row["name"]: row["ms"] for row in each["times"]}
    alone = {row["name"]: row["ms"] for row in each["collectives"] if "two numbers" not in row["name"]}
    methods = [name.removeprefix(SHARD) for name in whole if name.startswith(SHARD)]
    for way, needed in (("", ("all_reduce",)), (SEQUENCE, ("all_gather", "reduce_scatter"))):
        taken = sum(value for name, value in alone.items() if name.startswith(needed))
        for method in methods:
            name, shard = f"TP={size}, {method}{way}", f"{SHARD}{method}"
            verb = "take" if len(needed) > 1 else "takes"
            yield (
                f"- `{name}`: {ms(whole[name])} ms, a shard by itself {ms(whole[shard])} ms;"
                f" {' and '.join(needed)} alone {verb} {ms(taken)} ms, {taken / whole[name]:.1%} of it."
            )


def graph_rows(rows: list[Found]) -> Iterator[tuple[str, ...]]:
    """Yield one row for each way."""
    for row in rows:
        worst = max(row["apart"].values())
        same = "yes" if row["same_bits"] else f"no, apart by {small(worst)}"
        yield row["name"], ms(row["eager"]), ms(row["replayed"]), same


def error_rows(rows: list[Found]) -> Iterator[tuple[str, ...]]:
    """Yield one row for each way."""
    for row in rows:
        of_one = map(small, row["one_gpu"].values()) if row["one_gpu"] else "---"
        bits = ("yes" if row[name] else "**no**" for name in ("same_loss_everywhere", "same_bits_again"))
        yield row["name"], *map(small, row["float64"].values()), *of_one, *bits


def small(value: float) -> str:
    """Return an error."""
    return f"{value:.1e}"


if __name__ == "__main__":
    main("Page and plot of the benchmark of vocabulary-parallel linear cross entropy.", markdown, svg)
