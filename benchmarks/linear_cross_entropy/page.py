"""The page and the plot of the measurements of linear_cross_entropy.py. Standard library only, so any host can make them.

python benchmarks/linear_cross_entropy/page.py FILE.json [--write FILE.md] [--plot FILE.svg]
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Iterator

from linear_cross_entropy.goals import EAGER, FOUR, SETTINGS, THREE, goals, ratio, refuses, share, size
from linear_cross_entropy.plot import said, svg
from report import NO_FIT, Found, main, number, remarks, source, table

ACCURACY = {
    "dX": ("x", "norm"),
    "dW": ("weight", "norm"),
    "dW of frequent classes": ("frequent", "norm"),
    "dW, largest": ("weight", "max"),
    "dW, from PyTorch's": ("weight from plain", "norm"),
}
"""Columns of the tables of errors: the gradient, and the measure."""
LABELLED = (
    "Where some tokens alone have a label, the floors are products over these. Peers get these alone, too, selected",
    "before the call, which waits for the device; ours gets all tokens, and leaves the others out by itself.",
)
OPTIONS = ("ignore_index", "bias", "softcap", "label smoothing", "vocabulary parallel")


def markdown(found: Found) -> str:
    """Return the page."""
    clocks = next((each["clocks"] for each in found.get("none", ()) if each["clocks"]), {})
    busy = [f"- While our kernel ran: {', '.join(f'{name} {value}' for name, value in clocks.items())}"]
    parts = [
        "# Fused linear cross entropy",
        "",
        "Written by `benchmarks/linear_cross_entropy/run.py`, in one run. bfloat16, forward and backward; medians of",
        "contestants that take turns. Sizes are tokens x hidden size x vocabulary. `none` is a loss for each token, with",
        "random weights in the backward pass, half of them zero. Extra memory is the peak above the memory held before,",
        "less the results (losses and the two gradients). The floors are bare cuBLAS products on the same matrices:",
        "logits, gradient of the hidden states, gradient of the weight; four where the logits are computed twice.",
        "They compute all tokens. Ours skips those without a gradient in the backward pass if a quarter of them has none,",
        "and can be quicker than its floor. Its time where it computes all is a row of its own, and so is, in the",
        "tables of the mean, the time of skipping where there is nothing to skip. Where all logits fit into the memory of a",
        "block, as at 4096 x 2048 x 32000, keeping them is the same code as recomputing: differences there are noise.",
        *(LABELLED if found.get("labelled") else ()),
        "",
        f"![Time against extra memory]({found.get('plot', 'linear_cross_entropy.svg')})",
        "",
        *source(found, *(busy if clocks else ())),
        "",
        "## Asked and found",
        "",
        *table(("", "asked", "found", ""), goals(found)),
        *contract(found),
    ]
    for each in found.get("none", ()):
        parts += times(each, f"A loss for each token, {size(each['shape'])}", errors_of(found, each["shape"], "none"))
    for each in found.get("mean", ()):
        parts += times(each, f"The mean, {size(each['shape'])}", errors_of(found, each["shape"], "mean"))
    for each in found.get("labelled", ()):
        title = f"{share(each)}, the mean, {size(each['shape'])}"
        parts += times(each, title, {name: row.get("errors", {}) for name, row in each["rows"].items()})
        parts += ["The products are over the labelled tokens alone."]
    for each in found.get("accuracy", ()):
        parts += accuracy(each)
    return "\n".join([*parts, *absent(found), *remarks(found)]) + "\n"


def bold(name: str) -> str:
    """Return a name, in bold if it is ours."""
    return f"**{name}**" if name.startswith("ours") else name


def ms(value: float | None) -> str:
    """Return milliseconds with the digits that count."""
    return "-" if value is None else said(value)


def errors_of(found: Found, shape: Found, reduction: str) -> Found:
    """Return the errors at a shape with uniform labels, by name."""
    same = [each for each in found.get("accuracy", ()) if each["shape"] == shape]
    rows = same[0][reduction]["uniform"] if same else {}
    return {name: row["errors"] for name, row in rows.items() if "errors" in row}


# --- sections --------------------------------------------------------------------------------------------------


def contract(found: Found) -> list[str]:
    """Return the table of ways that compute a loss for each token, and of their options."""
    each = next(iter(found.get("accuracy", ())), None)
    if each is None:
        return []

    def rows() -> Iterator[tuple[str, ...]]:
        none, mean = (each[reduction]["uniform"] for reduction in ("none", "mean"))
        for name in none | mean:
            row = none.get(name) or {}
            options = (row or mean[name]).get("options")
            if options is not None and name not in SETTINGS:
                yield bold(name), verdict(row), *("yes" if option in options else "no" for option in OPTIONS)

    head = ("", "a loss for each token under a mask", *OPTIONS)
    lines = ["", f"## Contract, found at {size(each['shape'])}", ""]
    lines += ["Gradients under a random mask are right if they are within 5% of those in float64, norm over norm. The"]
    lines += ["other columns are the options of the signatures; they were not tried.", ""]
    return [*lines, *table(head, rows())]


def verdict(row: Found) -> str:
    """Return the verdict on a loss for each token."""
    if not row:
        return "not offered"
    if "failed" in row:
        word = "refuses" if refuses(row) else "does not run"
        return f"**{word}**: {cell(row['failed'])}"
    if row["right"]:
        return "right"
    errors = row["errors"]
    return f"**wrong**: dX is off by {errors['x']['norm']:.0%}, dW by {errors['weight']['norm']:.0%}"


def cell(text: str) -> str:
    """Return text that fits into a cell."""
    return text.replace("|", "\\|")[:160]


def times(each: Found, title: str, errors: Found) -> list[str]:
    """Return the table of one race."""
    rows = each["rows"]
    has_host = any("host_ms" in row for row in rows.values())

    def cells(name: str, row: Found) -> tuple[str, ...]:
        warm, cold = row["warm"], row["cold"] or {}
        if not warm:
            return bold(name), NO_FIT, *"-" * (8 + has_host)
        wrong = errors.get(name, {})
        return (
            bold(name),
            ms(warm["ms"]),
            ms(cold.get("ms")),
            ms(warm["stages"][0]),
            number(ratio(rows, name, THREE, "warm"), ".2f"),
            number(ratio(rows, name, FOUR, "warm"), ".2f"),
            *([ms(row.get("host_ms"))] if has_host else []),
            number(row.get("extra_mib"), ".0f"),
            number(wrong.get("loss", {}).get("norm"), ".1e"),
            number(wrong.get("x", {}).get("norm"), ".1e"),
            number(wrong.get("weight", {}).get("norm"), ".1e"),
        )

    head = (
        "", "ms", "ms, cold L2", "forward ms", "of three products", "of four", *(["host ms"] if has_host else []), "extra MiB", "error, loss", "error, dX",
        "error, dW",
    )  # fmt: skip
    order = sorted(rows, key=lambda name: (rows[name]["warm"] or {"ms": float("inf")})["ms"])
    lines = ["", f"## {title}", "", *table(head, (cells(name, rows[name]) for name in order))]
    return [
        *lines,
        "",
        *(
            ["Host ms is how long the host hands work over to a device that has nothing else to do."]
            if has_host
            else []
        ),
        f"The gradients take {each['outputs_mib']:.0f} MiB. Errors are against float64, norm over norm.",
    ]


def accuracy(each: Found) -> list[str]:
    """Return the table of errors with both kinds of labels."""
    kinds = {labels: rows for labels, rows in each["none"].items() if rows}

    def rows() -> Iterator[tuple[str, ...]]:
        for name in next(iter(kinds.values())):
            found = [kinds[labels].get(name, {}).get("errors") for labels in kinds]
            if not all(found):
                continue
            yield (
                bold(name),
                *(
                    f"{errors[part][measure]:.1e}" if part in errors else "-"
                    for errors in found
                    for part, measure in ACCURACY.values()
                ),
            )

    head = ("", *(f"{labels}: {column}" for labels in kinds for column in ACCURACY))
    lines = ["", f"## Errors of gradients under a mask, {size(each['shape'])}", ""]
    lines += ["Against float64, norm over norm; the largest one is over the largest value. Frequent are the 64 most"]
    lines += [
        f"frequent classes; `zipf` has labels as text has them. {EAGER} keeps its logits in bfloat16. The last column"
    ]
    lines += [f"of each kind is how far a gradient is from that of {EAGER}.", ""]
    return [*lines, *table(head, rows())]


def absent(found: Found) -> list[str]:
    """Return the list of ways that could not be measured."""
    lines = [f"- {name}: {why}" for name, why in found.get("absent", {}).items()]
    for each in found.get("accuracy", ()):
        for reduction in ("none", "mean"):
            for name, row in each[reduction]["uniform"].items():
                if "failed" in row:
                    lines.append(f"- {name}, {reduction}, {size(each['shape'])}: {row['failed']}")
    return ["", "## Did not run", "", *lines] if lines else []


if __name__ == "__main__":
    main("Page and plot of the benchmark of linear cross entropy.", markdown, svg)
