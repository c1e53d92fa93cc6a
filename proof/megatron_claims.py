"""Claims about Megatron-LM's own launcher under overlays, and their judgement."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from claims import Claim, Found, Verdict
from megatron_launches import BOTH, Launch, Layout, Way
from megatron_series import ROUNDING, apart

EXPECTED = ("dsa-sparse-attention", "dsa-indexer-streaming")
"""Overlays that a model of this kind has to reach in every step, forward and backward."""
NOISE = 2.0
"""How many times as far as two stock runs a run may be from a stock one, where they differ."""


def run(found: Found, launch: Launch) -> Found:
    """Return the measurements of one launch."""
    kept: Found = found["runs"][launch.name]
    return kept


def trains(found: Found) -> Verdict:
    """Judge that the loss falls with overlays, and that no step is skipped or without a number."""
    kept = run(found, Launch(Way.OVERLAYS))
    lost = sum(kept["skipped"]) + sum(kept["nans"])
    figure = f"loss {kept['losses'][0]:.3f} to {kept['losses'][-1]:.3f} in {len(kept['losses'])} steps; {lost:.0f} skipped or without a number"
    return Verdict.of(figure, holds=not lost and kept["losses"][-1] < kept["losses"][0])


def noise_of_stock(found: Found) -> float:
    """Return how far stock is from itself at most: launched once more, and where there is such a launch rounded otherwise."""
    others = [each.name for each in (Launch(Way.AGAIN), Launch(Way.ROUNDED)) if each.name in found["runs"]]
    return max(apart(found["runs"][each]["losses"], run(found, Launch(Way.STOCK))["losses"]) for each in others)


def as_stock(layout: Layout) -> Claim:
    """Return the claim that overlays change losses by no more than rounding."""

    def judge(found: Found) -> Verdict:
        stock, ours = (run(found, Launch(way, layout)) for way in BOTH)
        noise = noise_of_stock(found)
        losses, norms = (apart(ours[series], stock[series]) for series in ("losses", "norms"))
        figure = f"worst relative difference from stock: loss {losses:.1e}, grad norm {norms:.1e}; stock runs differ by {noise:.1e}"
        agreed = bool(ours["ranks"] and ours["ranks"]["agreed"])
        if layout is not Layout.ONE:
            figure += f"; {ours['ranks']['size'] if ours['ranks'] else 'no'} ranks were compared, and {'agree' if agreed else 'do not agree'}"
        return Verdict.of(figure, holds=losses <= max(ROUNDING, NOISE * noise) and agreed)

    words = {
        Layout.ONE: "with overlays its losses are stock's but for rounding",
        Layout.DATA: "over two data-parallel ranks with Megatron's distributed optimizer, too, and both ranks decide alike",
        Layout.TENSOR: "over two tensor-parallel ranks with sequence parallelism, too, and both ranks decide alike",
    }

    return Claim(
        f"megatron-losses-{layout.name.lower()}", words[layout], judge, over_ranks(Launch(Way.OVERLAYS, layout))
    )


def off(found: Found) -> Verdict:
    """Judge that `run` with everything off leaves each bit as it was, where two stock runs have the same bits."""
    stock, again, ours = (run(found, Launch(way)) for way in (Way.STOCK, Way.AGAIN, Way.OFF))
    noise, difference = (apart(each["losses"], stock["losses"]) for each in (again, ours))
    figure = f"worst relative difference from stock {difference:.1e}, between two stock runs {noise:.1e}"
    return Verdict.of(figure, holds=difference <= NOISE * noise)


def used(found: Found) -> Verdict:
    """Judge that the overlays that this model needs are reached in every step, and that none is in conflict."""
    kept = run(found, Launch(Way.OVERLAYS))
    calls = kept["calls"]
    reached = sum(decision == "active" for decision in kept["decisions"].values())
    conflicts = sorted(name for name, decision in kept["decisions"].items() if decision == "conflict")
    named = ", ".join(f"{name} {calls[name]} times" for name in sorted(calls, key=lambda name: -calls[name]))
    figure = f"{reached} active, in conflict: {', '.join(conflicts) or 'none'}; called in {len(kept['losses'])} steps: {named or 'none'}"
    enough = all(calls.get(name, 0) >= 2 * len(kept["losses"]) for name in EXPECTED)
    return Verdict.of(figure, holds=enough and not conflicts)


def over_ranks(launch: Launch) -> Callable[[Found], bool]:
    """Return whether a host has the devices of a launch."""
    return lambda found: launch.name in found["runs"]


def step_ms(launched: Found) -> float:
    """Return the median step of a launch, the first fifth of the steps left out."""
    kept = launched["ms"]
    return float(statistics.median(kept[len(kept) // 5 :]))


def faster(found: Found) -> Verdict:
    """Judge the median step."""
    stock, ours = (step_ms(run(found, Launch(way))) for way in BOTH)
    return Verdict.of(
        f"{ours:.0f} ms a step, stock {stock:.0f} ms: {stock / ours:.2f} times as fast", holds=ours < stock
    )


def smaller(found: Found) -> Verdict:
    """Judge the largest memory that Megatron reports of its first steps and of its checkpoints."""
    stock, ours = (run(found, Launch(way))["peak_mib"] for way in BOTH)
    return Verdict.of(f"{ours / 1024:.1f} GiB, stock {stock / 1024:.1f} GiB", holds=0 < ours < stock)


def on_a_gpu(found: Found) -> bool:
    """Whether times and memory are those of a GPU."""
    return bool(found["host"] == "gpu")


CLAIMS = (
    Claim("megatron-trains", "Megatron-LM's pretrain_hybrid.py, not edited, trains by `megacpp_overlays run`", trains),
    as_stock(Layout.ONE),
    Claim("megatron-used", "overlays are used, and not only active; none is in conflict", used),
    Claim("megatron-off", "with MEGACPP_OVERLAYS=off it does what stock does", off),
    as_stock(Layout.DATA),
    as_stock(Layout.TENSOR),
    Claim("megatron-time", "a step is faster with overlays", faster, asked=on_a_gpu),
    Claim("megatron-memory", "it needs less memory with overlays", smaller, asked=on_a_gpu),
)
