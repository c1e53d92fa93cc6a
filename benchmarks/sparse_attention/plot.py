"""The plot of attention over chosen keys: for each shape a bar for each contestant, in TFLOP/s of both passes, as SVG."""

from __future__ import annotations

from drawing import bar, sheet, text
from report import NO_FIT, Found, ms

TITLE = "Attention over chosen keys, forward and backward"
BARE = "bare products"
WIDTH, LEFT, RIGHT, ROW, BAR, GAP, TOP = 900, 190, 190, 22, 14, 34, 100


def svg(found: Found) -> str:
    """Return the plot; without shapes there is a sheet that says so."""
    shapes = found["shapes"]
    fastest = max((rate(row, shape) for shape in shapes for _, row in rows(shape) if row), default=1.0)
    scale = (WIDTH - LEFT - RIGHT) / fastest
    source = f"{found['host'].get('gpu', 'no GPU')}, torch {found['versions']['torch']}, {found['date']}"
    said = "TFLOP/s of two products forward and five backward; longer is faster." if shapes else "No shape was timed."
    body = [
        text(20, 30, TITLE, size=18, weight=600),
        text(20, 52, f"{source}. {said}", kind="quiet"),
        text(
            20,
            72,
            "Bare products are dense, in cuBLAS, of the same sizes: a yardstick of what the GPU can do.",
            kind="quiet",
        ),
    ]
    top = float(TOP)
    for shape in shapes:
        body.append(text(20, top + 4, shape["name"], weight=600))
        top += ROW - 8
        for name, row in rows(shape):
            width = rate(row, shape) * scale if row else 0.0
            words = f"{rate(row, shape):.0f} TFLOP/s, {ms(row['ms'])} ms" if row else NO_FIT
            body += [
                text(LEFT - 12, top + 12, name, anchor="end", weight=700 if name.startswith("ours") else 400),
                *([bar(LEFT, top, width, BAR, shade(name))] if row else []),
                text(LEFT + width + 8, top + 12, words, kind="quiet"),
            ]
            top += ROW
        top += GAP - ROW + 8
    return sheet(WIDTH, top, TITLE, described(shapes), body)


def rows(shape: Found) -> list[tuple[str, Found | None]]:
    """Return the contestants with both passes of a shape, by name; None for one that does not fit."""
    return [(name, row) for name, row in shape["contestants"].items() if row is None or len(row["stages"]) == 2]


def rate(row: Found, shape: Found) -> float:
    """Return TFLOP/s of both passes."""
    flops: float = shape["forward_flops"] + shape["backward_flops"]
    return flops / float(row["ms"]) / 1e9


def shade(name: str) -> str:
    """Return the kind of a bar."""
    return "ours" if name.startswith("ours") else "faint-bar" if name == BARE else "peer"


def described(shapes: list[Found]) -> str:
    """Return a description of the plot, in a sentence for each shape."""
    sentences = [
        f"{shape['name']}: "
        + ", ".join(
            f"{name} {rate(row, shape):.0f} TFLOP/s" if row else f"{name} {NO_FIT}" for name, row in rows(shape)
        )
        for shape in shapes
    ]
    return ". ".join([*sentences, ""]).strip() or "No shape was timed."
