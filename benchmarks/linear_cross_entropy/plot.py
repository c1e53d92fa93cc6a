"""The plot of the measurements of linear_cross_entropy.py: milliseconds as bars, the shortest first, each with its extra memory, as SVG."""

from __future__ import annotations

import math
from typing import NamedTuple

from drawing import bar, line, sheet, text
from linear_cross_entropy.goals import FOUR, LABELLED_ALONE, THREE, UNMASKED, share, size
from report import Found

WIDTH, LEFT, RIGHT = 1000, 290, 300
ROW, BAR, HEAD, PANEL = 24, 15, 84, 74
OURS = ("ours", "ours, logits kept", "liger-kernel 0.8.1 with the overlay")
"""Ours that are shown: the default, the setting that matters most, and the overlay on the release that is in use."""


class Measurement(NamedTuple):
    """One bar."""

    name: str
    kind: str
    """`ours`, `peer`, or `wrong` for one whose loss or gradients are not right with half of the tokens masked."""
    ms: float
    mib: float
    note: str = ""


class Panel(NamedTuple):
    """Measurements of one shape."""

    of: str
    each: Found
    bars: list[Measurement]


def svg(found: Found) -> str:
    """Return the plot, a panel for each shape and, where some tokens alone have a label, for each number of these."""
    masked, labelled = found.get("none", ()), found.get("labelled", ())
    panels = [Panel(size(each["shape"]), each, bars_of(found, each)) for each in masked]
    panels += [Panel(f"{share(each)}, {size(each['shape'])}", each, bars_of_labelled(each)) for each in labelled]
    panels = [one for one in panels if one.bars]
    shown = ["a loss for each token, half of the tokens masked"] if masked else []
    shown += ["the mean over labelled tokens, which others get alone"] if labelled else []
    source = f"{found['host'].get('gpu', 'no GPU')}, torch {found['versions']['torch']}, {found['date']}"
    body = [
        text(20, 30, "Linear cross entropy, forward and backward", size=18, weight=600),
        text(20, 52, f"{'; '.join([source, *shown])}. Shorter is faster.", kind="quiet"),
        bar(20, 63, 14, 12, "ours"),
        text(40, 74, "ours"),
        bar(100, 63, 14, 12, "peer"),
        text(120, 74, "others"),
    ]
    products = 190
    if masked:
        body += [bar(190, 63, 14, 12, "wrong"), text(210, 74, "wrong under a mask")]
        products = 360
    body += [line(products, 69, products + 18, 69, "floor", 2), text(products + 24, 74, "matrix products alone")]
    top = HEAD + 20
    for one in panels:
        body += drawn(one, top)
        top += PANEL + ROW * len(one.bars)
    return sheet(WIDTH, top, "Linear cross entropy, forward and backward: milliseconds", described(panels), body)


def described(panels: list[Panel]) -> str:
    """Return a description of the plot, in sentences."""
    sentences = ["Bars of milliseconds, the shortest first, one panel for each shape."]
    for of, _, bars in panels:
        ours = next((one for one in bars if one.kind == "ours"), None)
        peer = next((one for one in bars if one.kind == "peer"), None)
        if ours and peer:
            sentences.append(
                f"{of}: {ours.name} {said(ours.ms)} ms, the fastest of the others, {peer.name}, {said(peer.ms)} ms."
            )
    return " ".join(sentences)


def bars_of(found: Found, each: Found) -> list[Measurement]:
    """Return the bars of one shape, the fastest first; who refuses a loss for each token is there with its mean."""
    accuracy = [one for one in found.get("accuracy", ()) if one["shape"] == each["shape"]]
    judged = accuracy[0]["none"]["uniform"] if accuracy else {}
    bars: list[Measurement] = []
    for name, row in each["rows"].items():
        is_ours = row["kind"] == "ours" or name in OURS
        if row["kind"] == "floor" or (is_ours and name not in OURS):
            continue
        right = judged.get(name, {}).get("right", True)
        kind = "ours" if is_ours else "peer" if right else "wrong"
        bars += measured(name, kind, row, "" if right else wrong(judged[name]))
    for mean in found.get("mean", ()):
        if mean["shape"] == each["shape"]:
            for name, row in mean["rows"].items():
                if name not in each["rows"] and name != UNMASKED and row["kind"] == "peer":
                    bars += measured(name, "peer", row, "only its mean")
    return sorted(bars, key=lambda one: one.ms)


def bars_of_labelled(each: Found) -> list[Measurement]:
    """Return the bars of one share of labelled tokens, the fastest first; others have the names that they have elsewhere."""
    bars: list[Measurement] = []
    for name, row in each["rows"].items():
        if row["kind"] == "ours" and name in OURS:
            bars += measured(name, "ours", row, "")
        elif row["kind"] in {"peer", "plain"}:
            bars += measured(name.removesuffix(LABELLED_ALONE), "peer", row, "")
    return sorted(bars, key=lambda one: one.ms)


def measured(name: str, kind: str, row: Found, note: str) -> list[Measurement]:
    """Return the bar of a row, if it was measured."""
    if not row["warm"] or row.get("extra_mib") is None:
        return []
    return [Measurement(name, kind, row["warm"]["ms"], row["extra_mib"], note)]


def wrong(judged: Found) -> str:
    """Say how a result is wrong."""
    errors = judged.get("errors", {})
    numbers = [value for each in errors.values() for value in each.values()]
    return "returns NaN" if any(map(math.isnan, numbers)) else "wrong under a mask"


def drawn(panel: Panel, top: float) -> list[str]:
    """Return one panel: its shape, floors, and bars with their numbers."""
    of, each, bars = panel
    floors = {name: each["rows"][name]["warm"]["ms"] for name in (THREE, FOUR)}
    last = max(one.ms for one in bars)
    bottom = top + 30 + ROW * len(bars)

    def across(ms: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ms / last

    lines = [text(20, top, f"{of}, tokens x hidden size x vocabulary", size=15, weight=600)]
    for number, one in enumerate(bars):
        y = top + 30 + ROW * number
        weight = 700 if one.kind == "ours" else 400
        lines.append(text(LEFT - 10, y + BAR - 3, one.name, weight=weight, anchor="end"))
        lines.append(bar(LEFT, y, across(one.ms) - LEFT, BAR, one.kind))
        words = f"{said(one.ms)} ms, {one.mib:,.0f} MiB".replace(",", " ").replace("  ", ", ")
        lines.append(
            text(WIDTH - RIGHT + 14, y + BAR - 3, words + (f"; {one.note}" if one.note else ""), weight=weight)
        )
    for name, ms in floors.items():
        x, is_left = across(ms), name == THREE
        lines.append(line(x, top + 24, x, bottom - 6, "floor", 2))
        place = {"anchor": "end"} if is_left else {"anchor": "start"}
        lines.append(text(x + (-4 if is_left else 4), top + 19, f"{name} {said(ms)}", kind="floor-text", **place))
    return lines


def said(ms: float) -> str:
    """Return milliseconds as a person says them."""
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"
