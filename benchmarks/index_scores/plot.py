"""The plot of the measurements of index_scores.py: time and memory, before and after, on a log scale, as SVG."""

from __future__ import annotations

import math
from typing import Any

from drawing import bar, line, sheet, text

WIDTH, LEFT, RIGHT = 960, 330, 150
ROW, BAR, GAP, PANEL = 46, 15, 3, 66

Bars = list[tuple[str, float | None, float | None]]
"""Label, before, after; None for a number that was not measured or did not fit."""


def svg(found: dict[str, Any]) -> str:
    """Return the plot."""
    host = found["host"]
    source = f"{host.get('gpu', 'no GPU')}, megatron-core {found['versions']['megatron-core']}, {found['date']}"
    panels = [("Time, ms", bars_of(found, "ms")), ("Peak memory of the call, MiB", bars_of(found, "mib"))]
    body, top = [], 74
    for title, bars in panels:
        drawn = sorted((each for each in bars if each[1] or each[2]), key=lambda each: -(each[1] or each[2] or 0))
        if drawn:
            body += panel(title, drawn, top)
            top += PANEL + ROW * len(drawn)
    head = [
        text(20, 28, "DSA index scores, before and after", size=18, weight=600),
        text(20, 50, f"{source}. Log scale; shorter is better.", kind="quiet"),
        bar(WIDTH - 210, 16, 14, 14, "peer"),
        text(WIDTH - 190, 28, "before"),
        bar(WIDTH - 120, 16, 14, 14, "ours"),
        text(WIDTH - 100, 28, "after"),
    ]
    return sheet(WIDTH, top, "DSA index scores: time and memory, before and after", described(panels), [*head, *body])


def described(panels: list[tuple[str, Bars]]) -> str:
    """Return a description of the plot, in sentences."""
    sentences = ["Pairs of bars on a log scale, the longest first: upstream, and with the overlay."]
    for title, bars in panels:
        ratios = [before / after for _, before, after in bars if before and after]
        if ratios:
            sentences.append(f"{title}: {min(ratios):.1f} to {max(ratios):.1f} times less.")
    return " ".join(sentences)


def bars_of(found: dict[str, Any], kind: str) -> Bars:
    """Return the pairs of bars of one panel; kind is ms or mib."""
    field = {"ms": "ms", "mib": "extra_mib"}[kind]
    bars: Bars = []
    for each in found.get("forward", ()):
        before, after = (each["rows"][name] for name in ("upstream", "kernel"))
        sides = (
            [side["warm"] and side["warm"]["ms"] for side in (before, after)]
            if kind == "ms"
            else [side["extra_mib"] for side in (before, after)]
        )
        bars.append((f"forward, {size(each)}", *sides))
    for each in found.get("autograd", ()):
        before, after = (each["rows"][name] for name in ("upstream", "kernel"))
        sides = (
            [side["stages"] and side["stages"][1] for side in (before, after)]
            if kind == "ms"
            else [side["extra_mib"] for side in (before, after)]
        )
        bars.append((f"autograd backward, {size(each, each['batch'])}", *sides))
    for each in found.get("manual", ()):
        for one in each["main"]:
            where = size(each, one["batch"])
            if kind == "ms" and one is each["main"][0]:
                bars.append((f"loss backward, indexer half, {where}", *indexer_half(one)))
            label = f"loss backward, np={one['heads']}, {where}"
            bars.append((label, *(one["rows"].get(side, {}).get(field) for side in ("before", "after"))))
    for each in found.get("step", ()):
        label = f"whole step, np={each['heads']}, {size(each)}"
        bars.append((label, *(each["rows"].get(side, {}).get(field) for side in ("before", "after"))))
    return bars


def indexer_half(one: dict[str, Any]) -> tuple[float | None, float | None]:
    """Return the milliseconds of the gradients of q, weights and k: before, all but the loss half; after, the kernels."""
    loss, before = one["rows"]["loss half"]["ms"], one["rows"].get("before", {}).get("ms")
    after: float | None = one["rows"].get("kernel half", {}).get("ms")
    return before - loss if before and loss else None, after


def size(each: dict[str, Any], batch: int | None = None) -> str:
    """Return the sizes that tell the rows apart."""
    shape = each["shape"]
    return f"{shape['queries']} x {shape['keys']}, b={batch or shape['batch']}"


def panel(title: str, bars: Bars, top: int) -> list[str]:
    """Return one panel."""
    values = [value for _, *sides in bars for value in sides if value]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    low -= math.log10(min(values)) - low < 0.15  # else the shortest bar has no length
    span, bottom = max(1, high - low), top + 24 + ROW * len(bars)

    def place(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(value) - low) / span

    lines = [text(20, top + 6, title, size=15, weight=600)]
    for power in range(low, low + span + 1):
        x = place(10.0**power)
        lines.append(line(x, top + 12, x, bottom, "faint"))
        lines.append(text(x, top + 6, f"{10.0**power:g}", anchor="middle", kind="quiet"))
    for number, (label, before, after) in enumerate(bars):
        y = top + 22 + ROW * number
        lines.append(text(LEFT - 10, y + BAR + 5, label, anchor="end"))
        for value, kind, above in ((before, "peer", y), (after, "ours", y + BAR + GAP)):
            if not value:
                lines.append(text(LEFT + 6, above + BAR - 3, "not measured, or does not fit", kind="quiet"))
                continue
            end = place(value)
            lines.append(bar(LEFT, above, end - LEFT, BAR, kind))
            ratio = ""
            if kind == "ours" and before:
                ratio = f"  ({before / value:.1f} x less)" if before >= value else f"  ({value / before:.1f} x more)"
            said = f"{value:.3g}" if value < 100 else f"{value:,.0f}".replace(",", " ")
            lines.append(text(end + 6, above + BAR - 3, said + ratio))
    return lines
