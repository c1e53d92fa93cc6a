"""The plot of a layer at several lengths: time of a step on the left, memory on the right, both axes logarithmic, as SVG."""

from __future__ import annotations

import math

from drawing import curve, line, sheet, text
from report import Found

TITLE = "A layer of DeepSeek sparse attention, by length"
LINES = {"stock": ("other-line", ""), "stock, tilelang": ("other-line", "6 3"), "overlays": ("ours-line", "")}
"""The kind of the line of each way, and how it is dashed."""
WIDTH, HEIGHT, PANEL, TOP, GAP = 940, 440, 380, 100, 80


def svg(found: Found) -> str:
    """Return the plot of the runs with the fewest heads; without any there is a sheet that says so."""
    runs: list[Found] = [each for each in found["runs"] if each["ms"] is not None]
    source = f"{found['host'].get('gpu', 'no GPU')}, megatron-core {found['versions'].get('megatron-core', '?')}, {found['date']}"
    body = [text(20, 30, TITLE, size=18, weight=600)]
    if not runs:
        said = "Nothing was measured."
        return sheet(WIDTH, TOP, TITLE, said, [*body, text(20, 52, f"{source}. {said}", kind="quiet")])
    heads = min(each["heads"] for each in runs)
    runs = [each for each in runs if each["heads"] == heads]
    body.append(text(20, 52, f"{source}. {heads} heads, forward and backward; tokens go to the right.", kind="quiet"))
    body += panel(60, "Milliseconds", points(runs, "ms", 1.0))
    body += panel(60 + PANEL + GAP, "Peak of memory, GiB", points(runs, "mib", 1024.0))
    across = 20.0
    for name in dict.fromkeys(each["way"] for each in runs):
        kind, dash = LINES.get(name, ("axis", ""))
        body.append(curve([(across, HEIGHT - 16), (across + 24, HEIGHT - 16)], kind, 2.4, dash=dash))
        body.append(text(across + 30, HEIGHT - 12, name, size=12))
        across += 46 + 6.4 * len(name)
    said = ", ".join(f"{each['way']} {each['tokens']} tokens {each['ms']:.1f} ms" for each in runs)
    return sheet(WIDTH, HEIGHT, TITLE, f"{said}.", body)


def points(runs: list[Found], column: str, unit: float) -> dict[str, list[tuple[float, float]]]:
    """Return for each way the pairs of length and measurement, by length."""
    found: dict[str, list[tuple[float, float]]] = {}
    for each in runs:
        if each[column]:
            found.setdefault(each["way"], []).append((each["tokens"], each[column] / unit))
    return {name: sorted(each) for name, each in found.items()}


def panel(left: float, title: str, series: dict[str, list[tuple[float, float]]]) -> list[str]:
    """Return a panel with a line for each way."""
    bottom, height = HEIGHT - 60, HEIGHT - 60 - TOP
    body = [text(left, TOP - 16, title, weight=600)]
    every = [point for each in series.values() for point in each]
    if not every:
        return [*body, text(left, TOP + 16, "not measured", kind="quiet")]
    lengths = sorted({tokens for tokens, _ in every})
    first, last = math.log2(lengths[0]), math.log2(lengths[-1])
    low = math.floor(math.log2(min(number for _, number in every)))
    high = max(low + 1, math.ceil(math.log2(max(number for _, number in every))))

    def at(tokens: float, number: float) -> tuple[float, float]:
        share = (math.log2(tokens) - first) / max(last - first, 1e-9)
        return left + PANEL * share, bottom - height * (math.log2(number) - low) / (high - low)

    for power in range(low, high + 1):
        _, y = at(lengths[0], 2.0**power)
        body.append(line(left, y, left + PANEL, y, "faint"))
        body.append(text(left - 8, y + 4, f"{2.0**power:g}", kind="quiet", size=11, anchor="end"))
    body.append(line(left, bottom, left + PANEL, bottom, "axis"))
    body += [text(at(each, 1)[0], bottom + 16, f"{each:g}", kind="quiet", size=11, anchor="middle") for each in lengths]
    for name, each in series.items():
        kind, dash = LINES.get(name, ("axis", ""))
        body.append(curve([at(*point) for point in each], kind, 2.4, dash=dash))
    return body
