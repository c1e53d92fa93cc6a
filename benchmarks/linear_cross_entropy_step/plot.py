"""The plot of whole training steps: a bar for each way to have the loss, with forward, backward and optimizer in it, as SVG."""

from __future__ import annotations

from drawing import bar, sheet, text
from report import Found, ms

TITLE = "A training step and its loss"
WIDTH, LEFT, RIGHT, ROW, BAR, TOP = 1000, 190, 330, 34, 20, 104
STAGES = ("forward", "backward", "optimizer")
SHADES = {"forward": "ours", "backward": "peer", "optimizer": "faint-bar"}


def svg(found: Found) -> str:
    """Return the plot; without times there is a sheet that says so."""
    bars = [(name, row) for name, row in found.get("times", {}).items() if row and not name.endswith(", alone")]
    size = found["size"]
    source = f"{found['host'].get('gpu', 'no GPU')}, torch {found['versions']['torch']}, {found['date']}"
    model = f"{found.get('parameters', 0) / 1e9:.1f} billion parameters, {size['batch']} x {size['sequence']} tokens, vocabulary {size['vocabulary']}"
    body = [
        text(20, 30, TITLE, size=18, weight=600),
        text(
            20, 52, f"{source}; {model}. Milliseconds; shorter is faster." if bars else f"{source}. No step was timed."
        ),
    ]
    across = 20.0
    for stage in STAGES if bars else ():
        body += [bar(across, 65, 14, 12, SHADES[stage]), text(across + 20, 76, stage)]
        across += 110
    scale = (WIDTH - LEFT - RIGHT) / max((row["ms"] for _, row in bars), default=1.0)
    for number, (name, row) in enumerate(bars):
        top, begin = TOP + ROW * number, float(LEFT)
        body.append(text(LEFT - 12, top + 15, name, anchor="end", weight=700 if name.startswith("kernel") else 400))
        for stage, taken in zip(STAGES, row["stages"], strict=True):
            body.append(bar(begin, top, taken * scale, BAR, SHADES[stage]))
            begin += taken * scale
        body.append(text(begin + 10, top + 15, ", ".join(said(found, name, row)), kind="quiet"))
    return sheet(WIDTH, TOP + ROW * len(bars) + 10, TITLE, described(bars), body)


def said(found: Found, name: str, row: Found) -> list[str]:
    """Return the labels of a bar: the step, its loss alone, and its peak of memory."""
    words = [f"{ms(row['ms'])} ms"]
    if alone := found["times"].get(f"{name}, alone"):
        words.append(f"loss {ms(alone['ms'])}")
    peak = found.get("memory", {}).get(name, {})
    if peak.get("step_mib") is not None:
        words.append(f"{(peak['held_mib'] + peak['step_mib']) / 1024:.1f} GiB")
    return words


def described(bars: list[tuple[str, Found]]) -> str:
    """Return a description of the plot, in a sentence."""
    if not bars:
        return "No step was timed."
    numbers = ", ".join(f"{name} {ms(row['ms'])}" for name, row in bars)
    return f"Bars of milliseconds of a step: {numbers}."
