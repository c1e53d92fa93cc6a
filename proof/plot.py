"""The plot of a proof: the series that the Trainer logs, stock, with the overlay, and with PyTorch's own loss."""

from __future__ import annotations

from typing import NamedTuple

from claims import Found
from drawing import curve, line, sheet, text
from trainer_launches import Data, Launch, Way

WIDTH, HEIGHT, TOP, BOTTOM, ACROSS = 900, 400, 96, 350, 370


class Panel(NamedTuple):
    """One pair of axes."""

    words: str
    data: Data
    what: str
    left: float


class Line(NamedTuple):
    """The style of one way, and its place in the legend."""

    way: Way
    kind: str
    width: float
    words: str
    left: float


PANELS = (
    Panel("Loss where the first tokens do not count", Data.PROMPTS, "losses", 60),
    Panel("grad_norm where every token counts, some more", Data.WEIGHTS, "norms", 490),
)
LINES = (  # from the bottom up: of two equal lines, the narrower lies within the broader
    Line(Way.TORCH, "other", 7, "PyTorch's loss, the broad line", 520),
    Line(Way.STOCK, "wrong", 2, "stock liger-kernel 0.8.1", 20),
    Line(Way.OVERLAY, "ours", 2, "the same, launched by megacpp_overlays run", 200),
)


def svg(found: Found) -> str:
    """Return the plot; one without lines where the Trainer was not measured."""
    title = "The same Trainer three times, step by step"
    where = f"{found['host'].get('gpu', 'CPU')}, torch {found['versions']['torch']}, transformers {found['versions']['transformers']}, {found['date']}"
    body = [text(20, 26, title, size=16, weight=600), text(20, 46, where, kind="quiet")]
    body += [text(each.left, 70, each.words, kind=f"{each.kind}-text") for each in LINES]
    measured = found["measured"].get("trainer")
    if measured is None:
        return sheet(WIDTH, HEIGHT, title, "The Trainer was not measured.", body)
    sentences = ["Two panels of three lines."]
    for panel in PANELS:
        values = {each.way: measured["runs"][Launch(panel.data, each.way).name][panel.what] for each in LINES}
        body += _drawn(panel, values, measured["steps"])
        ends = "; ".join(f"{way.value} {each[0]:.2f} to {each[-1]:.2f}" for way, each in values.items())
        sentences.append(f"{panel.words}: {ends}.")
    return sheet(WIDTH, HEIGHT, title, " ".join(sentences), body)


def across_steps(left: float, place: int, steps: int) -> float:
    """Return where a step is drawn, counted from 0, on axes that begin at `left`."""
    return left + ACROSS * place / (steps - 1)


def steps_below(left: float, steps: int) -> list[str]:
    """Return the words below axes of steps: the first, the middle and the last one."""
    shown = sorted({0, (steps - 1) // 2, steps - 1})
    return [
        *(text(across_steps(left, place, steps), BOTTOM + 18, str(place + 1), anchor="middle") for place in shown),
        text(left + ACROSS / 2, BOTTOM + 38, "step", kind="quiet", anchor="middle"),
    ]


def _drawn(panel: Panel, values: dict[Way, list[float]], steps: int) -> list[str]:
    top = max(value for each in values.values() for value in each) * 1.05
    right = panel.left + ACROSS

    def down(value: float) -> float:
        return TOP + 20 + (BOTTOM - TOP - 20) * (1 - value / top)

    body = [text(panel.left, TOP + 6, panel.words, weight=600)]
    for value in range(int(top) + 1):
        body.append(line(panel.left, down(value), right, down(value), "faint" if value else "axis"))
        body.append(text(panel.left - 8, down(value) + 4, str(value), anchor="end"))
    body += steps_below(panel.left, steps)
    for each in LINES:
        points = [(across_steps(panel.left, place, steps), down(value)) for place, value in enumerate(values[each.way])]
        body.append(curve(points, f"{each.kind}-line", each.width))
    return body
