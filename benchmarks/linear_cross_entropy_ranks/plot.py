"""The plot of a loss over ranks: a panel for each size of the group, a bar for each way, and the products that it cannot avoid."""

from __future__ import annotations

from drawing import bar, line, sheet, text
from linear_cross_entropy_ranks.times import floor
from report import Found, ms

TITLE = "Vocabulary-parallel linear cross entropy"
WIDTH, LEFT, RIGHT, ROW, BAR, TOP, HEAD = 1000, 400, 150, 24, 15, 112, 36


def svg(found: Found) -> str:
    """Return the plot: times of the ranks of a group, not of one by itself."""
    panels = [(size, bars_of(size, each["times"])) for size, each in found["sizes"].items() if each.get("times")]
    shape = found["shape"]
    source = f"{found['host'].get('gpu', 'no GPU')}, {found['backend']}, {found['date']}"
    body = [
        text(20, 30, TITLE, size=18, weight=600),
        text(
            20, 52,
            f"{source}; {shape['tokens']} x {shape['hidden']} x {shape['vocabulary']}, forward and backward, milliseconds; shorter is "
            "faster.", kind="quiet",
        ),
        bar(20, 65, 14, 12, "ours"),
        text(40, 76, "all tokens computed"),
        bar(200, 65, 14, 12, "peer"),
        text(220, 76, "masked half skipped"),
        line(370, 65, 370, 78, "floor", 2),
        text(380, 76, "the products of a shard, over all tokens", kind="floor-text"),
    ]  # fmt: skip
    top = float(TOP)
    longest = max((taken for _, bars in panels for _, taken, _ in bars), default=1.0)
    scale = (WIDTH - LEFT - RIGHT) / longest
    for size, bars in panels:
        body.append(text(20, top, f"{size} ranks", size=15, weight=600))
        top += HEAD - 22
        for name, taken, least in bars:
            body += [
                text(LEFT - 12, top + 12, name, anchor="end"),
                bar(LEFT, top, taken * scale, BAR, "peer" if "skipped" in name else "ours"),
                line(LEFT + least * scale, top - 2, LEFT + least * scale, top + BAR + 2, "floor", 2),
                text(
                    LEFT + max(taken, least) * scale + 10,
                    top + 12,
                    f"{ms(taken)} ms, {taken / least:.2f} x",
                    kind="quiet",
                ),
            ]
            top += ROW
        top += HEAD
    return sheet(WIDTH, top, TITLE, described(panels), body)


def bars_of(size: str, rows: list[Found]) -> list[tuple[str, float, float]]:
    """Return the ways of a group with their milliseconds, and those of the products that they cannot avoid."""
    by_name = {row["name"]: row for row in rows}
    return [
        (row["name"].partition(", ")[2], row["ms"], floor(row["name"], by_name))
        for row in rows
        if row["name"].startswith(f"TP={size},")
    ]


def described(panels: list[tuple[str, list[tuple[str, float, float]]]]) -> str:
    """Return a description of the plot, in sentences."""
    sentences = ["Bars of milliseconds, one panel for each size of the group."]
    sentences += [
        f"{size} ranks: {', '.join(f'{name} {ms(taken)}' for name, taken, _ in bars)}." for size, bars in panels
    ]
    return " ".join(sentences)
