"""The plot of a proof with Megatron-LM's own launcher: losses step by step, and on a GPU the time and the memory of a step."""

from __future__ import annotations

import math
from typing import NamedTuple

from claims import Found
from drawing import bar, curve, line, sheet, text
from megatron_claims import on_a_gpu, run, step_ms
from megatron_launches import BOTH, Launch, Way
from plot import ACROSS, BOTTOM, HEIGHT, TOP, WIDTH, across_steps, steps_below

NARROW, LEFT = 540, 60
BARS, LONGEST, ROW = 520, 250, 84


class Look(NamedTuple):
    """How one way is drawn."""

    kind: str
    """Of its line and of its words in the legend."""
    bars: str
    """The kind of its bars."""
    width: float
    """Of its line."""
    words: str


LOOKS = {
    Way.STOCK: Look("other", "peer", 7.0, "stock, the broad line"),
    Way.OVERLAYS: Look("ours", "ours", 2.0, "by megacpp-overlays run"),
}


class Pair(NamedTuple):
    """One number of both ways."""

    words: str
    values: dict[Way, float]
    form: str
    """How a number is written."""


def svg(found: Found) -> str:
    """Return the plot; one without lines where the launches over one rank were not measured."""
    title = "Megatron-LM's own launcher, stock and with overlays"
    where = f"{found['host'].get('gpu', 'CPU')}, torch {found['versions']['torch']}, {found['date']}"
    body = [text(20, 26, title, size=16, weight=600), text(20, 46, where, kind="quiet")]
    measured = found["measured"].get("megatron")
    if measured is None:
        return sheet(WIDTH, HEIGHT, title, "The launches over one rank were not measured.", body)
    body += [
        text(left, 70, LOOKS[way].words, kind=f"{LOOKS[way].kind}-text")
        for left, way in zip((LEFT, LEFT + 190), BOTH, strict=True)
    ]
    series = {way: run(measured, Launch(way))["losses"] for way in BOTH}
    ends = "; ".join(f"{way.value} {each[0]:.3f} to {each[-1]:.3f}" for way, each in series.items())
    sentences = [f"Loss of each step: {ends}."]
    body += _losses(series)
    drawn = pairs(found)
    for place, pair in enumerate(drawn):
        body += _bars(pair, TOP + 6 + place * ROW)
        numbers = ", ".join(f"{way.value} {pair.form.format(pair.values[way])}" for way in BOTH)
        sentences.append(f"{pair.words}: {numbers}.")
    return sheet(WIDTH if drawn else NARROW, HEIGHT, title, " ".join(sentences), body)


def pairs(found: Found) -> list[Pair]:
    """Return the pairs of bars; none on a CPU, whose times and memory do not predict a GPU's."""
    measured, batches = found["measured"]["megatron"], found["measured"].get("megatron-micro-batch")
    if not on_a_gpu(measured):
        return []
    drawn = [
        Pair("a step", {way: step_ms(run(measured, Launch(way))) for way in BOTH}, "{:.0f} ms"),
        Pair("most memory", {way: run(measured, Launch(way))["peak_mib"] / 1024 for way in BOTH}, "{:.1f} GiB"),
    ]
    if batches:
        largest = {way: float(batches["largest"][way.value]) for way in BOTH}
        drawn.append(Pair("largest micro-batch that fits", largest, "{:.0f}"))
    return drawn


def _losses(series: dict[Way, list[float]]) -> list[str]:
    """Draw losses on a logarithmic axis: on a linear one the last steps would lie on the axis."""
    values = [value for each in series.values() for value in each]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    steps, right = len(series[Way.STOCK]), LEFT + ACROSS

    def down(value: float) -> float:
        return TOP + 20 + (BOTTOM - TOP - 20) * (high - math.log10(value)) / (high - low)

    body = [text(LEFT, TOP + 6, "Loss", weight=600)]
    for decade in range(low, high + 1):
        body.append(line(LEFT, down(10**decade), right, down(10**decade), "axis" if decade == low else "faint"))
        body.append(text(LEFT - 8, down(10**decade) + 4, f"{10**decade:g}", anchor="end"))
    body += steps_below(LEFT, steps)
    for way in BOTH:
        points = [(across_steps(LEFT, place, steps), down(value)) for place, value in enumerate(series[way])]
        body.append(curve(points, f"{LOOKS[way].kind}-line", LOOKS[way].width))
    return body


def _bars(pair: Pair, top: float) -> list[str]:
    longest = max(pair.values.values())
    body = [text(BARS, top, pair.words, weight=600)]
    for place, way in enumerate(BOTH):
        at, length = top + 10 + place * 24, LONGEST * pair.values[way] / longest
        body.append(bar(BARS, at, length, 18, LOOKS[way].bars))
        body.append(text(BARS + length + 8, at + 14, f"{pair.form.format(pair.values[way])}, {way.value}"))
    return body
