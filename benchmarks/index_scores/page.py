"""The page and the plot of the measurements of index_scores.py. Standard library only, so that any host can make them again.

python benchmarks/index_scores/page.py FILE.json [--write FILE.md] [--plot FILE.svg]
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Iterator

from index_scores.plot import indexer_half, svg
from report import NO_FIT, Found, main, ms, number, remarks, source, table

LABELS = {
    "upstream": "upstream's einsum",
    "head by head": "per-head bmm",
    "streaming": "streaming, plain PyTorch",
    "torch.compile": "torch.compile of the einsum",
    "kernel": "kernel",
    "loss half": "loss half before: main attention, softmax, divergence",
    "target": "the target after: main attention, added up over heads",
    "before": "before",
    "after": "after",
    "kernel half": "the two kernels by themselves",
}
SCORES_TIMES, BACKWARD_TIMES, OF_MATMUL, OUTPUT_AND = 25, 8, 0.8, 1.05


def markdown(found: Found) -> str:
    """Return the page."""
    clocks = [f"{name} {value}" for name, value in (clocks_of(found) or {}).items()]
    parts = [
        "# Index scores of DeepSeek Sparse Attention",
        "",
        "Written by `benchmarks/index_scores/run.py`, in one run. bfloat16 inputs. Medians of contestants that take turns;",
        "memory is the peak above the memory held before the call, results included, in MiB. `before` is megatron-core as",
        "it is, `after` the same with the overlay active. Float32 products are float32, not TF32, as is torch's default.",
        "",
        "![Time and memory, before and after](index_scores.svg)",
        "",
        *source(found, *([f"- Busy with products: {', '.join(clocks)}"] if clocks else [])),
        "",
        "## Asked and found",
        "",
        "The backward of the fused loss is asked of the indexer's half, the gradients of q, weights and k, and a step as a",
        "whole: scores, top-k, which is upstream's before and after, loss and backward.",
        "",
        *table(("", "asked", "found", ""), goals(found)),
    ]
    for name, section in (("forward", forward), ("autograd", autograd), ("manual", manual), ("step", step)):
        for each in found.get(name, ()):
            parts += section(each)
    for each in found.get("largest", ()):
        parts += largest(each)
    return "\n".join([*parts, *remarks(found)]) + "\n"


def clocks_of(found: Found) -> Found | None:
    """Return clocks, power and temperature, where they were read."""
    return next((each["clocks"] for each in found.get("forward", ())), None)


def size(shape: Found, batch: int | None = None) -> str:
    """Return sizes in words."""
    return (
        f"{shape['queries']} x {shape['keys']}, b={batch or shape['batch']}, {shape['heads']} heads, d={shape['dim']}"
    )


def heads_of(count: int) -> str:
    """Return a number of main heads in words."""
    return f"{count} main head{'s' * (count != 1)}"


def times(before: float | None, after: float | None) -> str:
    """Return how many times faster."""
    return f"{before / after:.1f} x" if before and after else "-"


# --- goals ---------------------------------------------------------------------------------------------------


def goals(found: Found) -> Iterator[tuple[str, str, str, str]]:
    """Yield the goal, the measurement, and whether it is enough."""
    for each in found.get("forward", ()):
        where, rows = f"forward, {size(each['shape'])}", each["rows"]
        kernel = rows["kernel"]
        for name in ("upstream", "head by head"):
            if rows[name]["warm"]:
                ratio = rows[name]["warm"]["ms"] / kernel["warm"]["ms"]
                yield goal(where, f">= {SCORES_TIMES} x {LABELS[name]}", f"{ratio:.1f} x", ratio >= SCORES_TIMES)
        share = kernel["warm"]["of_matmul"]
        yield goal(where, f">= {OF_MATMUL:.0%} of the matmul rate", f"{share:.1%}", share >= OF_MATMUL)
        if kernel["extra_mib"] is not None:
            over = kernel["extra_mib"] / each["output_mib"]
            yield goal(where, "peak <= output + 5%", f"output {over - 1:+.2%}", over <= OUTPUT_AND)
        if "errors" in rows["upstream"]:
            yield from accuracy(where, kernel["errors"], rows["upstream"]["errors"])
        if top := each.get("top_k"):
            seen = (
                f"{top['rows_that_differ']} of {top['rows']} rows differ, by {top['largest_gap']:.1f} roundings at most"
            )
            limit = each["shape"]["heads"]
            yield goal(where, f"top-{top['topk']} of upstream, but for rounding", seen, top["largest_gap"] <= limit)
        yield goal(where, "same bits again", "yes" if each["same_bits_again"] else "no", each["same_bits_again"])
    for each in found.get("autograd", ()):
        where, rows = f"autograd, {size(each['shape'], each['batch'])}", each["rows"]
        if rows["upstream"]["ms"]:
            ratio = rows["upstream"]["stages"][1] / rows["kernel"]["stages"][1]
            yield goal(where, f"backward >= {BACKWARD_TIMES} x", f"{ratio:.1f} x", ratio >= BACKWARD_TIMES)
            for name, errors in rows["kernel"]["errors"].items():
                yield from accuracy(f"{where}, {name}", errors, rows["upstream"]["errors"][name])
        yield from memory(where, each, rows["kernel"])
    for each in found.get("manual", ()):
        for one in each["main"]:
            where, rows = f"fused loss, {heads_of(one['heads'])}, {size(each['shape'], one['batch'])}", one["rows"]
            if rows["before"]["ms"]:
                ratio = rows["before"]["ms"] / rows["after"]["ms"]
                yield f"{where}, loss half included", "backward", f"{ratio:.1f} x", SAID
            before, after = indexer_half(one)
            if before and after:
                ratio = before / after
                yield goal(where, f"backward >= {BACKWARD_TIMES} x", f"{ratio:.1f} x", ratio >= BACKWARD_TIMES)
            yield from memory(where, one, rows["kernel half"])
    for each in found.get("step", ()):
        yield from of_step(each)


SAID = "not asked, said all the same"
"""Verdict on a number that has no limit."""
STEP_SHAPE = {"queries": 4096, "keys": 4096, "batch": 8, "heads": 32, "dim": 128}
STEP_HEADS, STEP_MS, STEP_MATRICES = 16, 50, 6
"""Where a step is asked for its time, main heads included; and how many float32 score matrices it may hold anywhere."""


def of_step(each: Found) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows that compare a step with its limits."""
    where, shape, after = (
        f"step, {heads_of(each['heads'])}, {size(each['shape'])}",
        each["shape"],
        each["rows"]["after"],
    )
    if not after["ms"]:
        return
    if (shape, each["heads"]) == (STEP_SHAPE, STEP_HEADS):
        yield goal(where, f"<= {STEP_MS} ms", f"{after['ms']:.1f} ms", after["ms"] <= STEP_MS)
    if after["extra_mib"] is not None:
        limit = STEP_MATRICES * 4 * shape["queries"] * shape["keys"] * each["batch"] / 2**20
        seen = f"{after['extra_mib']:.0f} of {limit:.0f} MiB"
        yield goal(where, f"peak <= {STEP_MATRICES} score matrices", seen, after["extra_mib"] <= limit)


def goal(where: str, asked: str, seen: str, reached: bool) -> tuple[str, str, str, str]:
    """Return one row."""
    return where, asked, seen, "reached" if reached else "**missed**"


def accuracy(where: str, ours: Found, theirs: Found) -> Iterator[tuple[str, str, str, str]]:
    """Yield the row that compares errors, norm over norm, and the largest one if it is an outlier."""
    seen = {kind: f"{ours[kind]:.1e} (upstream {theirs[kind]:.1e})" for kind in ours}
    yield goal(where, "error <= 2 x upstream's", seen["norm"], ours["norm"] <= 2 * theirs["norm"])
    if ours["max"] > 2 * theirs["max"]:
        yield where, "largest single error", seen["max"], SAID


def memory(where: str, each: Found, row: Found) -> Iterator[tuple[str, str, str, str]]:
    """Yield the row that compares the peak of a backward with its limit."""
    if row["extra_mib"] is not None:
        limit = each["gradients_mib"] + 2 * each["scores_mib"]
        seen = f"{row['extra_mib']:.0f} of {limit:.0f} MiB"
        yield goal(where, "peak <= gradients + 2 score matrices", seen, row["extra_mib"] <= limit)


# --- sections --------------------------------------------------------------------------------------------------


def forward(each: Found) -> list[str]:
    """Return the section on the scores alone."""
    upstream = each["rows"]["upstream"]["warm"] or {}

    def cells(name: str, row: Found) -> tuple[str, ...]:
        warm, cold, errors = row["warm"], row["cold"] or {}, row.get("errors", {})
        if not warm:
            return LABELS.get(name, name), NO_FIT, *"-" * 7
        is_work = not row["matmul"]
        return (
            LABELS.get(name, f"bf16 {name}"),
            ms(warm["ms"]),
            ms(cold.get("ms")),
            number(warm["tflops"]),
            f"{warm['of_matmul']:.1%}",
            times(upstream.get("ms"), warm["ms"]) if is_work else "-",
            number(row.get("extra_mib"), ".0f"),
            number(errors.get("max"), ".1e"),
            number(errors.get("norm"), ".1e"),
        )

    head = (
        "",
        "ms",
        "ms, cold L2",
        "TFLOP/s",
        "of matmul",
        "against upstream",
        "peak MiB",
        "error, max",
        "error, norm",
    )
    lines = ["", f"## Forward, {size(each['shape'])}", ""]
    lines += table(head, (cells(name, row) for name, row in each["rows"].items()))
    lines += ["", f"The output takes {each['output_mib']:.0f} MiB. Errors are against float64, on some rows of each"]
    lines += ["batch element: the largest over the largest value, and norm over norm."]
    if top := each.get("top_k"):
        lines += [
            "",
            f"Top-{top['topk']}: {top['rows_that_differ']} of {top['rows']} rows choose other keys than upstream. The "
            f"traded keys' scores differ by at most {top['largest_gap']:.1f} roundings, the scores themselves by at most "
            f"{top['largest_difference']:.1f}. A rounding is 2^-24 of the sum of the magnitudes that a score adds up.",
        ]
    return lines


def autograd(each: Found) -> list[str]:
    """Return the section on autograd through the function."""
    upstream = each["rows"]["upstream"]

    def cells(name: str, row: Found) -> tuple[str, ...]:
        if not row["ms"]:
            return LABELS[name], NO_FIT, *"-" * 7
        backward = row["stages"][1]
        errors = (f"{row['errors'][of]['norm']:.1e}" for of in ("q", "weights", "k"))
        ratio = times(upstream["stages"][1], backward) if upstream["ms"] else "-"
        return LABELS[name], ms(row["stages"][0]), ms(backward), ratio, number(row["extra_mib"], ".0f"), *errors

    head = ("", "forward ms", "backward ms", "against upstream", "peak MiB", "error, q", "error, weights", "error, k")
    lines = ["", f"## Backward through autograd, {size(each['shape'], each['batch'])}", ""]
    if larger := each.get("does_not_fit"):
        ours = larger["of"]["rows"]["kernel"]
        lines += [f"Upstream does not fit at b={larger['batch']}; the kernel takes {ms(ours['ms'])} ms there.", ""]
    lines += table(head, (cells(name, row) for name, row in each["rows"].items()))
    lines += [
        "",
        f"The gradients take {each['gradients_mib']:.0f} MiB, a score matrix {each['scores_mib']:.0f} MiB. The peak",
    ]
    lines += ["is that of both passes. Errors are against float64, norm over norm, on the first batch element; the"]
    return [*lines, "gradients themselves are bfloat16."]


def manual(each: Found) -> list[str]:
    """Return the section on Megatron's backward of the fused loss."""
    lines = ["", f"## Backward of the fused indexer loss, {size(each['shape'])}", ""]
    lines += [
        "The loss half (main attention, softmax, divergence) is replaced, too. The indexer half is, before, the whole less"
    ]
    lines += ["the loss half, and after, the two kernels by themselves."]
    for one in each["main"]:
        rows = one["rows"]
        lines += ["", f"{heads_of(one['heads'])}, b={one['batch']}:", ""]
        order = [name for name in ("loss half", "target", "before", "after", "kernel half") if name in rows]
        cells = [
            (LABELS[name], ms(rows[name]["ms"]) if rows[name]["ms"] else NO_FIT, number(rows[name]["extra_mib"], ".0f"))
            for name in order
        ]
        before, after = indexer_half(one)
        cells += [("indexer half, before", ms(before), "-"), ("indexer half, after", ms(after), "-")]
        lines += table(("", "ms", "peak MiB"), cells)
        if "apart" in one:
            whole = times(rows["before"]["ms"], rows["after"]["ms"])
            lines += ["", f"The indexer half is {times(before, after)} faster, the whole {whole}."]
            apart = ", ".join(f"{value:.1e}" for value in one["apart"])
            lines += [f"Gradients of q, weights and k differ from upstream's by {apart} of the largest value."]
    return lines


def step(each: Found) -> list[str]:
    """Return the section on a step of the indexer."""
    return ["", f"## Scores, top-k, loss and backward, {size(each['shape'])}", "", *steps(each, each["heads"])]


def steps(each: Found, heads: int) -> list[str]:
    """Return the table of a step before and after."""
    rows = each["rows"]

    def cells(name: str, row: Found) -> tuple[str, ...]:
        if not row["ms"]:
            return name, NO_FIT, *"-" * 4
        ratio = times(rows["before"]["ms"], row["ms"])
        return name, *map(ms, row["stages"]), ms(row["ms"]), ratio, number(row["extra_mib"], ".0f")

    head = ("", "forward ms", "backward ms", "both ms", "against before", "peak MiB")
    lines = [f"{heads_of(heads)}, b={each['batch']}, upstream's sparse loss.", ""]
    return [*lines, *table(head, (cells(name, row) for name, row in rows.items()))]


def largest(each: Found) -> list[str]:
    """Return the section on how much fits."""
    shape = each["shape"]
    words = {
        "scores": "the scores",
        "autograd": "the scores and their backward, through autograd",
        "step": f"scores, top-k, loss and backward, {heads_of(each['heads'])}",
    }

    def batch(side: Found | None) -> str:
        if side is None:
            return "-"
        exact = side["fails"] == side["batch"] + 1
        return f"{side['batch']}" if exact else f">= {side['batch']}"

    where = f"{shape['queries']} x {shape['keys']}, {shape['heads']} heads, d={shape['dim']}"
    lines = ["", f"## Largest micro-batch that fits, {where}", ""]
    rows = ((words[work], batch(sides["before"]), batch(sides["after"])) for work, sides in each["rows"].items())
    lines += table(("", "before", "after"), rows)
    if "step" in each:
        lines += ["", "A step at the largest micro-batch that fits both:", "", *steps(each["step"], each["heads"])]
    return lines


if __name__ == "__main__":
    main("Page and plot of the benchmark of index scores.", markdown, svg)
