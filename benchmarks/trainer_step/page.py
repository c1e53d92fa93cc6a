"""The page and the plot of the measurements of run.py. Standard library only, so that any host can make them again.

python benchmarks/trainer_step/page.py FILE.json [--write FILE.md] [--plot FILE.svg]
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Iterator

from drawing import bar, sheet, text
from report import Found, main, ms, table, whole

TITLE = "Steps of the Trainer with Liger's loss"
TORCH, STOCK, OVERLAY, KEPT = "transformers alone", "Liger", "Liger, overlay", "Liger, overlay, logits kept"
HEAD = ("labelled", "", "step", "against Liger", "output layer and loss", "against Liger", "peak, MiB")
CURVE = ("", "first loss", "tenth", "twentieth", "last", "apart from Liger, at most")
WIDTH, LEFT, RIGHT, ROW, BAR, GAP, TOP = 900, 270, 150, 22, 14, 30, 96


def markdown(found: Found) -> str:
    """Return the page."""
    return whole(TITLE, found, section(found))


def section(found: Found) -> Iterator[str]:
    """Yield the description of the measurement, and a table."""
    size = found["size"]
    yield from [
        "Written by `benchmarks/trainer_step/run.py`. The Trainer of transformers tunes a Llama of "
        f"{size['layers']} layers, hidden size {size['hidden']},",
        f"vocabulary {size['vocabulary']}, on {size['rows']} rows of {size['tokens']} tokens a step, in bfloat16 where there is a GPU, "
        "with `use_liger_kernel` but in the first way.",
        "Of each row the last tokens are labelled. Milliseconds, medians; a step is forward, backward and optimizer, and output layer",
        "and loss are timed alone, too, forwards and backwards, as the model calls them.",
        "",
    ]
    yield from table(HEAD, rows(found))
    if curves := found.get("curves"):
        yield from [
            "",
            "Losses of the same model with 4 layers and parameters in float32 under autocast, a quarter of the tokens labelled, from the same "
            "weights; differences are relative:",
            "",
            *table(CURVE, curve_rows(curves)),
        ]


def rows(found: Found) -> Iterator[tuple[str, ...]]:
    """Yield a row for each way and share, the larger share first."""
    for share in shares(found):
        stock = found["ways"].get(STOCK, {}).get(share)
        for way, by_share in found["ways"].items():
            if (row := by_share.get(share)) is None:
                continue
            yield (
                f"{float(share):.0%}",
                way,
                ms(row["step"]),
                times(stock and stock["step"], row["step"]),
                ms(row["alone"]),
                times(stock and stock["alone"], row["alone"]),
                f"{row['peak']:.0f}",
            )


def curve_rows(curves: dict[str, list[float]]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each way."""
    stock = curves.get(STOCK)
    for way, losses in curves.items():
        shown = (losses[0], losses[min(9, len(losses) - 1)], losses[min(19, len(losses) - 1)], losses[-1])
        yield way, *(f"{each:.4f}" for each in shown), "-" if stock is None else f"{apart(losses, stock):.1e}"


def shares(found: Found) -> list[str]:
    """Return the shares that any way has, the larger first."""
    return sorted({share for by_share in found["ways"].values() for share in by_share}, key=float, reverse=True)


def times(slow: float | None, quick: float) -> str:
    """Return how many times as quick."""
    return "-" if slow is None else f"{slow / quick:.2f} x"


def apart(losses: list[float], others: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(one - other) / abs(other) for one, other in zip(losses, others, strict=True))


def svg(found: Found) -> str:
    """Return bars of milliseconds: a group for each share, a bar for each way, the loss in it in a stronger colour."""
    groups = [
        (share, [(way, each[share]) for way, each in found["ways"].items() if share in each]) for share in shares(found)
    ]
    longest = max((row["step"] for _, bars in groups for _, row in bars), default=1.0)
    scale = (WIDTH - LEFT - RIGHT) / longest
    source = f"{found['host'].get('gpu', 'no GPU')}, liger-kernel {found['versions'].get('liger-kernel', '?')}, {found['date']}"
    body = [
        text(20, 30, TITLE, size=18, weight=600),
        text(20, 52, f"{source}. Milliseconds of a step; shorter is faster.", kind="quiet"),
        bar(20, 63, 14, 12, "ours"),
        text(40, 74, "output layer and loss"),
        bar(190, 63, 14, 12, "peer"),
        text(210, 74, "the rest of a step"),
    ]
    top = float(TOP)
    for share, bars in groups:
        body.append(text(20, top + 14, f"{float(share):.0%} of tokens labelled", weight=600))
        top += GAP - 6
        for way, row in bars:
            of_loss = min(row["alone"], row["step"])
            body += [
                text(LEFT - 12, top + 12, way, anchor="end"),
                bar(LEFT, top, row["step"] * scale, BAR, "peer"),
                bar(LEFT, top, of_loss * scale, BAR, "ours"),
                text(
                    LEFT + row["step"] * scale + 8,
                    top + 12,
                    f"{ms(row['step'])} ms, loss {ms(row['alone'])}",
                    kind="quiet",
                ),
            ]
            top += ROW
        top += GAP - ROW
    return sheet(
        WIDTH,
        top + 10,
        TITLE,
        "Bars of milliseconds of a step and of its loss, a group for each share of labelled tokens.",
        body,
    )


if __name__ == "__main__":
    main("Make the page of Trainer steps again.", markdown, svg)
