"""The plot of training with sparse attention: losses on the left, how far each way is from float32 on the right, as SVG."""

from __future__ import annotations

import math

from drawing import curve, line, sheet, text
from report import Found

TITLE = "Training with DeepSeek sparse attention"
TRUTH = "stock, float32"
LINES = {
    "stock": ("other-line", ""),
    "stock, again": ("other-line", "1 4"),
    "stock, channels in another order": ("other-line", "6 4"),
    "stock, tilelang": ("axis", "6 3"),
    "overlays": ("ours-line", ""),
}
"""The kind of the line of each way, and how it is dashed; the truth has a grey one."""
WIDTH, HEIGHT, PANEL, TOP, FLOOR, GAP = 940, 440, 380, 100, 1e-7, 80


def svg(found: Found) -> str:
    """Return the plot; without a way that was trained there is a sheet that says so."""
    ways: Found = found["ways"]
    source = f"{found['host'].get('gpu', 'no GPU')}, megatron-core {found['versions'].get('megatron-core', '?')}, {found['date']}"
    body = [text(20, 30, TITLE, size=18, weight=600)]
    if not ways:
        said = "Nothing was trained."
        return sheet(WIDTH, TOP, TITLE, said, [*body, text(20, 52, f"{source}. {said}", kind="quiet")])
    body.append(text(20, 52, f"{source}. The same weights and documents for all; steps go to the right.", kind="quiet"))
    losses = {name: one["losses"] for name, one in ways.items()}
    body += panel(60, "Loss", losses, is_log=False)
    if TRUTH in ways and len(ways) > 1:
        away = {name: apart(each, losses[TRUTH]) for name, each in losses.items() if name != TRUTH}
        body += panel(60 + PANEL + GAP, "Relative difference of the loss from float32", away, is_log=True)
    across = 20.0
    for name in ways:
        kind, dash = LINES.get(name, ("axis", ""))
        body += [curve([(across, HEIGHT - 16), (across + 24, HEIGHT - 16)], kind, 2.4, dash=dash)]
        body += [text(across + 30, HEIGHT - 12, name, size=12)]
        across += 46 + 6.4 * len(name)
    return sheet(WIDTH, HEIGHT, TITLE, described(ways), body)


def panel(left: float, title: str, series: dict[str, list[float]], *, is_log: bool) -> list[str]:
    """Return a panel with a line for each series."""
    bottom, height = HEIGHT - 60, HEIGHT - 60 - TOP
    shown = {
        name: [math.log10(max(each, FLOOR)) if is_log else each for each in found] for name, found in series.items()
    }
    every = [each for found in shown.values() for each in found if math.isfinite(each)] or [0.0]
    low, high = (math.floor(min(every)), math.ceil(max(every))) if is_log else (min(every), max(every))
    high = high if high > low else low + 1

    def at(step: int, of: int, number: float) -> tuple[float, float]:
        return left + PANEL * step / max(1, of - 1), bottom - height * (number - low) / (high - low)

    body = [text(left, TOP - 16, title, weight=600)]
    marks = range(int(low), int(high) + 1) if is_log else [low + (high - low) * part / 4 for part in range(5)]
    for mark in marks:
        _, y = at(0, 2, mark)
        body += [line(left, y, left + PANEL, y, "faint")]
        body += [text(left - 8, y + 4, f"1e{mark}" if is_log else f"{mark:.2f}", kind="quiet", size=11, anchor="end")]
    body.append(line(left, bottom, left + PANEL, bottom, "axis"))
    for name, found in shown.items():
        kind, dash = LINES.get(name, ("axis", ""))
        points = [at(step, len(found), each) for step, each in enumerate(found) if math.isfinite(each)]
        body.append(curve(points, kind, dash=dash))
    steps = max(map(len, shown.values()))
    return [*body, text(left + PANEL, bottom + 16, f"step {steps}", kind="quiet", size=11, anchor="end")]


def apart(numbers: list[float], others: list[float]) -> list[float]:
    """Return relative differences, step by step."""
    return [abs(one - other) / abs(other) for one, other in zip(numbers, others, strict=True)]


def described(ways: Found) -> str:
    """Return a description of the plot, in a sentence."""
    return "Last losses: " + ", ".join(f"{name} {one['losses'][-1]:.4f}" for name, one in ways.items()) + "."
