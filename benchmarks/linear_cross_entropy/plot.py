"""The plot of what linear_cross_entropy.py measured: time against extra memory, a point for each contestant, as SVG."""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

from linear_cross_entropy.goals import EXTRA_MIB, FOUR, OF_FLOOR, THREE, UNMASKED, size
from report import Found

WIDTH, LEFT, RIGHT = 1000, 76, 24
PANEL, HEAD, FOOT, GAP = 380, 92, 30, 76
BLUE, GREY, RED, GREEN, TEXT, FAINT = "#1f6feb", "#8b949e", "#cf222e", "#1a7f37", "#1b1f24", "#d8dde3"
LEAST_MIB = 1.0
"""Where a point without extra memory is drawn: a log scale has no zero."""

Point = tuple[str, str, float, float]
"""Name, kind of mark, milliseconds, MiB."""


def svg(found: Found) -> str:
    """Return the plot, a panel for each shape."""
    panels = [(each, points_of(found, each)) for each in found.get("none", ())]
    panels = [(each, points) for each, points in panels if points]
    height = HEAD + len(panels) * (PANEL + GAP)
    source = f"{found['host'].get('gpu', 'no GPU')}, torch {found['versions']['torch']}, {found['date']}"
    body: list[str] = []
    for place, (each, points) in enumerate(panels):
        body += panel(each, points, HEAD + 26 + place * (PANEL + GAP))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" font-family="system-ui, sans-serif" font-size="13" fill="{TEXT}">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            text(20, 28, "Linear cross entropy, forward and backward", size_px=18, weight=600),
            text(20, 50, f"{source}; half of the tokens are masked. Left is faster, down is smaller.", fill="#57606a"),
            *legend(20, 72),
            *body,
            "</svg>\n",
        ]
    )


def legend(x: float, y: float) -> list[str]:
    """Return what the marks mean."""
    lines = []
    for kind, words, wide in (
        ("ours", "ours", 70),
        ("right", "right under a mask", 160),
        ("refuses", "refuses a loss for each token: its mean", 290),
        ("wrong", "wrong under a mask", 160),
    ):
        lines += [mark(kind, x + 8, y - 4), text(x + 22, y, words)]
        x += wide
    lines += [f'<line x1="{x}" x2="{x + 18}" y1="{y - 4}" y2="{y - 4}" stroke="{GREEN}" stroke-width="2"/>']
    return [*lines, text(x + 24, y, "floor: matrix products alone")]


def points_of(found: Found, each: Found) -> list[Point]:
    """Return the points of one shape; who refuses a loss for each token is there with its mean."""
    accuracy = [one for one in found.get("accuracy", ()) if one["shape"] == each["shape"]]
    said = accuracy[0]["none"]["uniform"] if accuracy else {}
    points: list[Point] = []
    for name, row in each["rows"].items():
        if row["kind"] != "floor":
            kind = "ours" if row["kind"] == "ours" else "right" if said.get(name, {}).get("right", True) else "wrong"
            points += point(name, kind, row)
    for mean in found.get("mean", ()):
        if mean["shape"] == each["shape"]:
            for name, row in mean["rows"].items():
                if name not in each["rows"] and name != UNMASKED and row["kind"] == "peer":
                    points += point(f"{name}, mean", "refuses", row)
    return points


def point(name: str, kind: str, row: Found) -> list[Point]:
    """Return the point of a row, if it was measured."""
    if not row["warm"] or row.get("extra_mib") is None:
        return []
    return [(name, kind, row["warm"]["ms"], max(LEAST_MIB, row["extra_mib"]))]


def panel(each: Found, points: list[Point], top: float) -> list[str]:
    """Return one panel: axes, floors, the corner that was asked for, points with names."""
    bottom = top + PANEL - FOOT
    floors = {name: each["rows"][name]["warm"]["ms"] for name in (THREE, FOUR)}
    last = 1.05 * max(ms for _, _, ms, _ in points)
    high = math.log10(2.5 * max(mib for *_, mib in points))

    def across(ms: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ms / last

    def up(mib: float) -> float:
        return bottom - (bottom - top) * (math.log10(mib) + 0.15) / (high + 0.15)

    lines = [text(20, top - 14, f"{size(each['shape'])}, tokens x hidden size x vocabulary", size_px=15, weight=600)]
    corner, edge = up(EXTRA_MIB), across(OF_FLOOR * floors[FOUR])
    lines.append(
        f'<rect x="{LEFT}" y="{corner:.1f}" width="{edge - LEFT:.1f}" height="{bottom - corner:.1f}" fill="{BLUE}" '
        'fill-opacity="0.07"/>'
    )
    lines.append(text(LEFT + 8, bottom - 22, f"asked for: {EXTRA_MIB} MiB, {OF_FLOOR} x four products", fill=BLUE))
    for power in range(int(high) + 1):
        y = up(10.0**power)
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{FAINT}"/>')
        lines.append(text(LEFT - 8, y + 4, f"{10**power:,}".replace(",", " "), anchor="end", fill="#57606a"))
    step = tick(last)
    for number in range(int(last / step) + 1):
        x = across(number * step)
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}" stroke="{GREY}"/>')
        lines.append(text(x, bottom + 19, f"{number * step:g}", anchor="middle", fill="#57606a"))
    lines.append(
        text(
            WIDTH - RIGHT, bottom + 34, "extra peak memory in MiB (log) over milliseconds", anchor="end", fill="#57606a"
        )
    )
    lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}" stroke="{GREY}"/>')
    for name, ms in floors.items():
        x = across(ms)
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="{GREEN}" stroke-width="2"/>')
        is_left = name == THREE
        words = f"{name} {said(ms)}"
        lines.append(text(x + (-4 if is_left else 4), top + 2, words, anchor="end" if is_left else "start", fill=GREEN))
    placed = [(name, kind, across(ms), up(mib), f"{name}: {said(ms)} ms") for name, kind, ms, mib in points]
    return lines + labels(placed, top + 12, bottom - 4)


def tick(last: float) -> float:
    """Return a round distance between ticks, for about eight of them."""
    power: float = 10.0 ** math.floor(math.log10(last / 8))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * 9 >= last)


def said(ms: float) -> str:
    """Return milliseconds as a person says them."""
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def labels(placed: list[tuple[str, str, float, float, str]], top: float, bottom: float) -> list[str]:
    """Return marks and names; a name moves until it meets no other name and no mark. Ours come first, and on top."""
    lines: list[str] = []
    marks: list[str] = []
    taken: list[tuple[float, float, float, float]] = [(x - 9, y - 8, x + 9, y + 8) for _, _, x, y, _ in placed]
    for _name, kind, x, y, words in sorted(placed, key=lambda each: (each[1] != "ours", each[3])):
        wide = (7.3 if kind == "ours" else 6.6) * len(words)
        spots = [
            (left, y + 4 + sign * away)
            for away in range(0, 200, 4)
            for sign in (1, -1)
            for left in (x + 13, x - 13 - wide)
            if top <= y + 4 + sign * away - 12 and y + 4 + sign * away <= bottom
            if left >= LEFT + 2 and left + wide <= WIDTH - 4
        ]
        left, base = next((spot for spot in spots if free(*spot, wide, taken)), (x + 13, y + 4))
        taken.append((left, base - 11, left + wide, base + 3))
        if abs(base - 4 - y) > 6:
            near = left - 2 if left > x else left + wide + 2
            ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{near:.1f}" y2="{base - 4:.1f}"'
            lines.append(f'<line {ends} stroke="{GREY}" stroke-width="0.8"/>')
        colour, weight = {"ours": (BLUE, 700), "wrong": (RED, 400)}.get(kind, (TEXT, 400))
        lines.append(text(left, base, words, weight=weight, fill=colour))
        marks.insert(0, mark(kind, x, y))
    return lines + marks


def free(left: float, base: float, wide: float, taken: list[tuple[float, float, float, float]]) -> bool:
    """Return whether a line of text meets nothing."""
    return all(left + wide < x1 or left > x2 or base + 3 < y1 or base - 11 > y2 for x1, y1, x2, y2 in taken)


def mark(kind: str, x: float, y: float) -> str:
    """Return one mark."""
    if kind == "ours":
        corners = []
        for number in range(10):
            radius, angle = (10.0, 4.2)[number % 2], math.pi * (number / 5 - 0.5)
            corners.append(f"{x + radius * math.cos(angle):.1f},{y + radius * math.sin(angle):.1f}")
        return f'<polygon points="{" ".join(corners)}" fill="{BLUE}" stroke="white"/>'
    if kind == "wrong":
        arms = f"M{x - 5:.1f} {y - 5:.1f}l10 10M{x + 5:.1f} {y - 5:.1f}l-10 10"
        return f'<path d="{arms}" stroke="{RED}" stroke-width="2.5"/>'
    filled = "white" if kind == "refuses" else "#57606a"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="{filled}" stroke="#57606a" stroke-width="1.8"/>'


def text(
    x: float, y: float, words: str, *, size_px: int = 13, weight: int = 400, anchor: str = "start", fill: str = TEXT
) -> str:
    """Return one line of text."""
    style = f'font-size="{size_px}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'
