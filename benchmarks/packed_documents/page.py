"""The page and the plot of the measurements of packed_documents/run.py. Standard library only."""

from __future__ import annotations

import statistics

from drawing import curve, sheet, text
from report import Found, table

WAYS = {"without": "wrong", "with": "ours", "told": "other"}
"""Each way and the kind of its lines."""
WIDTH, HEIGHT, LEFT, TOP = 900, 420, 70, 80


def markdown(found: Found) -> str:
    """Return the page."""
    host, size, runs = found["host"], found["size"], found["runs"]
    seeds = ", ".join(str(run["seed"]) for run in runs)
    lines = [
        "# Mamba state across packed documents",
        "",
        "Written by `benchmarks/packed_documents/run.py`. `without` is megacpp_overlays without `mamba-packed-seq-idx`, which is",
        "megatron-core as it is, `with` the same with the overlay, `told` without it and with `total_tokens` from the caller.",
        "",
        f"- Date: {found['date']}",
        f"- Host: {host.get('gpu', 'no GPU')}, {host['machine']}, Python {host['python']}",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in found['versions'].items())}",
        f"- The run took {found['seconds']} s",
        "",
        f"Layers {found['pattern']}, hidden size {size['hidden']}, state {size['state']}, fp32; {size['documents']} documents of {size['document']} tokens in a row of {size['row']}, {size['keys']} keys and",
        f"{size['values']} values; {found['steps']} steps of AdamW, learning rate {size['rate']:g}; seeds {seeds}. A guess has a loss of {_guess(size):.2f}.",
        "",
        *_section("from nothing", "Trained on packed rows from nothing", runs),
        *_section("tuned", f"Tuned on packed rows, after {found['first']} steps on documents alone", runs),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _section(start: str, title: str, runs: list[Found]) -> list[str]:
    chosen = [run[start] for run in runs]
    same = sum(run["with"]["bits"] == run["told"]["bits"] for run in chosen)
    return [
        f"## {title}",
        "",
        "Documents that were not trained on, packed as in training and each alone, at the end; mean over seeds:",
        "",
        *table(
            ["", "loss, packed", "right, packed", "loss, alone", "right, alone", "seconds"],
            [[way, *_end(chosen, way)] for way in WAYS],
        ),
        "",
        f"In {same} of {len(runs)} seeds `with` and `told` have the same losses in every bit. Right answers about documents alone",
        f"at the end, by seed: {'; '.join(_by_seed(chosen, way) for way in WAYS)}.",
        "",
        f"Loss of the rows of training, mean over seeds and the {runs[0][start]['with']['looks'][1]['step']} steps before:",
        "",
        *table(["steps", *WAYS], _losses(chosen)),
        "",
        "Share of right answers, of documents packed and alone; mean over seeds:",
        "",
        *table(["steps", *(f"{way}, {how}" for how in ("packed", "alone") for way in WAYS)], _curve(chosen)),
        "",
    ]


def _guess(size: Found) -> float:
    import math

    return math.log(size["values"])


def _end(runs: list[Found], way: str) -> list[str]:
    last = [run[way]["looks"][-1] for run in runs]
    means = {name: statistics.fmean(each[name] for each in last) for name in last[0]}
    return [
        f"{means['packed loss']:.3f}",
        f"{means['packed right']:.1%}",
        f"{means['alone loss']:.3f}",
        f"{means['alone right']:.1%}",
        f"{statistics.fmean(run[way]['seconds'] for run in runs):.0f}",
    ]


def _places(runs: list[Found]) -> list[int]:
    last = len(runs[0]["with"]["looks"]) - 1
    return sorted({round(number * last / 12) for number in range(13)})


def _curve(runs: list[Found]) -> list[list[str]]:
    def mean(way: str, how: str, place: int) -> str:
        return f"{statistics.fmean(run[way]['looks'][place][f'{how} right'] for run in runs):.1%}"

    return [
        [
            str(runs[0]["with"]["looks"][place]["step"]),
            *(mean(way, how, place) for how in ("packed", "alone") for way in WAYS),
        ]
        for place in _places(runs)
    ]


def _losses(runs: list[Found]) -> list[list[str]]:
    def mean(way: str, place: int) -> str:
        return f"{statistics.fmean(run[way]['looks'][place]['row loss'] for run in runs):.3f}"

    begin = ["1", *(f"{statistics.fmean(run[way]['first loss'] for run in runs):.3f}" for way in WAYS)]
    places = _places(runs)[1:]
    return [
        begin,
        *([str(runs[0]["with"]["looks"][place]["step"]), *(mean(way, place) for way in WAYS)] for place in places),
    ]


def _by_seed(runs: list[Found], way: str) -> str:
    return f"`{way}` {', '.join(format(run[way]['looks'][-1]['alone right'], '.0%') for run in runs)}"


def svg(found: Found) -> str:
    """Return the loss of documents alone against the steps of tuning, a line for each way and seed."""
    runs = [run["tuned"] for run in found["runs"]]
    top = max(look["alone loss"] for run in runs for way in WAYS for look in run[way]["looks"])
    steps = max(found["steps"], 1)

    def place(step: float, loss: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - 20) * step / steps
        return across, TOP + (HEIGHT - TOP - 50) * (1 - loss / top)

    body: list[str] = []
    for run in runs:
        for way, kind in WAYS.items():
            points = [place(look["step"], look["alone loss"]) for look in run[way]["looks"]]
            body.append(curve(points, f"{kind}-line", dash="2 5" if way == "told" else ""))
    body += [text(LEFT + 120 * number, 62, way, kind=f"{kind}-text") for number, (way, kind) in enumerate(WAYS.items())]
    for part in range(5):
        across, down = round(place(steps * part / 4, 0)[0], 1), round(place(0, top * part / 4)[1], 1)
        body.append(text(across - 8, HEIGHT - 26, f"{steps * part / 4:.0f}"))
        body.append(text(24, down + 4, f"{top * part / 4:.1f}"))
    title = "Loss of the answers about documents alone, against steps of tuning on packed rows"
    where = f"{found['host'].get('gpu', 'no GPU')}, torch {found['versions']['torch']}, {found['date']}"
    last = {way: statistics.fmean(run[way]["looks"][-1]["alone loss"] for run in runs) for way in WAYS}
    shown = ", ".join(f"{way} {loss:.2f}" for way, loss in last.items())
    head = [text(20, 24, title), text(20, 43, f"{where}; a line for each seed", kind="quiet")]
    return sheet(WIDTH, HEIGHT, title, f"Lines over {steps} steps. Mean loss at the end: {shown}.", [*head, *body])
