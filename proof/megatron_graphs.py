"""Megatron's local CUDA graphs around attention, stock and with overlays: the launches, and their claims.

Whether sparse attention can be captured is for the run to say. Both ends are judged: overlays train under graphs as they do without,
or the error that stops them stops stock in the same way.
"""

from __future__ import annotations

import statistics
import time

from claims import Claim, Found, Outcome, Say, Verdict, Workplace
from megatron_launcher import ended, prepared, tried
from megatron_series import ROUNDING, apart

STEPS = 8
"""The first one is recorded, the others are replayed."""
GRAPHS = ("--cuda-graph-impl", "local", "--cuda-graph-modules", "attn")
"""One graph forward and one backward for each layer of sparse attention. Experts cannot be captured whole: their tokens are counted."""
EAGER, OURS, STOCK = "overlays, no graphs", "overlays, graphs", "stock, graphs"
TAKES = f"3 launches of {STEPS} steps on one GPU, none elsewhere"


def measure(place: Workplace, say: Say) -> Found:
    """Return how each launch ended; on a CPU, that there is nothing to capture."""
    site = prepared(place)
    runs: dict[str, Found] = {}
    if site.sizes.host == "gpu":
        for number, name in enumerate((EAGER, OURS, STOCK), start=1):
            began = time.monotonic()
            words = ["--train-iters", str(STEPS), *(() if name == EAGER else GRAPHS)]
            runs[name] = run = tried(site, name, words, overlays=name != STOCK)
            captured = f", {run['graphs']} graphs" if run.get("graphs") else ""
            say(f"[{number}/3] Megatron: {name}: {ended(run)}{captured}, {time.monotonic() - began:.0f} s")
    return {**site.about(), "words": list(GRAPHS), "runs": runs}


def trains_under_graphs(found: Found) -> Verdict:
    """Judge that graphs were made and that losses are those without them, or that stock ends in the same way."""
    eager, ours, stock = (found["runs"][name] for name in (EAGER, OURS, STOCK))
    if "error" in eager:
        return Verdict(Outcome.FAILS, f"without graphs: {eager['error']}")
    if "error" in ours:
        same = stock.get("error") == ours["error"]
        return Verdict(Outcome.UPSTREAM if same else Outcome.FAILS, f"{ours['error']}; {_of_stock(stock, eager)}")
    off = apart(ours["losses"], eager["losses"])
    figure = f"{ours['graphs']} graphs, worst relative difference of a loss from the run without them {off:.1e}; "
    figure += f"{_ms(ours):.0f} ms a step, without {_ms(eager):.0f} ms; {_of_stock(stock, eager)}"
    lost = sum(ours["skipped"]) + sum(ours["nans"])
    return Verdict.of(figure, holds=bool(ours["graphs"]) and not lost and off <= ROUNDING)


def _of_stock(stock: Found, eager: Found) -> str:
    """Return in words how stock does under graphs."""
    if "error" in stock:
        return f"stock: {stock['error']}"
    return f"stock: {stock['graphs']} graphs, its losses {apart(stock['losses'], eager['losses']):.1e} from those"


def _ms(run: Found) -> float:
    """Return the median step of those that are replayed, the first of which may still warm up."""
    return float(statistics.median(run["ms"][2:]))


CLAIMS = (
    Claim(
        "megatron-graphs",
        "under local CUDA graphs of sparse attention a run with overlays trains as without them",
        trains_under_graphs,
        asked=lambda found: bool(found["runs"]),
    ),
)
