"""Megatron-LM's own launcher over two context-parallel ranks, each with a part of every sequence, and its claims."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from claims import Claim, Found, Say, Verdict, Workplace
from megatron_claims import NOISE, over_ranks, run
from megatron_launcher import prepared
from megatron_launches import Launch, Layout, Way, all_of
from megatron_series import ROUNDING, apart

LAUNCHES = tuple(Launch(way, Layout.CONTEXT) for way in (Way.STOCK, Way.OVERLAYS, Way.AGAIN))
STOCK, OURS, AGAIN = LAUNCHES
TAKES = f"{len(LAUNCHES)} launches on two ranks, none on one GPU"
UNPINNED = Path(__file__).resolve().parent / "on_cpu_unpinned"


def measure(place: Workplace, say: Say) -> Found:
    """Return the log of each launch, of none on a host with one device, and the version of the checkout."""
    site = prepared(place)
    if site.sizes.host == "cpu":
        site = replace(site, sizes=replace(site.sizes, path=(UNPINNED,)))
    return {**site.about(), "steps": site.sizes.steps, "runs": all_of(LAUNCHES, site, say)}


def as_stock(found: Found) -> Verdict:
    """Judge that overlays change losses by no more than rounding, and that both ranks decide alike."""
    stock, ours, again = (run(found, each) for each in LAUNCHES)
    noise = apart(again["losses"], stock["losses"])
    losses, norms = (apart(ours[series], stock[series]) for series in ("losses", "norms"))
    agreed = bool(ours["ranks"] and ours["ranks"]["agreed"])
    lost = sum(ours["skipped"]) + sum(ours["nans"])
    figure = (
        f"loss {ours['losses'][0]:.3f} to {ours['losses'][-1]:.3f} in {len(ours['losses'])} steps; worst relative difference from "
        f"stock: loss {losses:.1e}, grad norm {norms:.1e}; stock runs differ by {noise:.1e}; the ranks "
        f"{'agree' if agreed else 'do not agree'}"
    )
    return Verdict.of(figure, holds=not lost and losses <= max(ROUNDING, NOISE * noise) and agreed)


CLAIMS = (
    Claim(
        "megatron-context",
        "over two context-parallel ranks, each with a part of every sequence, its losses are stock's, too, and both ranks decide alike",
        as_stock,
        over_ranks(OURS),
    ),
)
