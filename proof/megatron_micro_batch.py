"""The largest micro-batch that fits on a GPU, stock and with overlays: its search, and its claims."""

from __future__ import annotations

import time
from collections.abc import Callable

from claims import Claim, Found, Say, Verdict, Workplace
from megatron_launcher import Site, ended, is_out_of_memory, prepared, tried
from megatron_launches import BOTH, Way
from processes import ProofError

STEPS = 2
"""The second one has the state of the optimizer in addition to everything else."""
MOST = 64
"""Samples; the search ends there, because larger numbers are of no interest."""
TAKES = "about 8 launches of 2 steps on one GPU, 14 at most, none elsewhere"


def measure(place: Workplace, say: Say) -> Found:
    """Return the largest micro-batch of each way, and how each launch ended; on a CPU, that there is nothing to look for."""
    site = prepared(place)
    found: Found = {**site.about(), "most": MOST, "largest": {}, "tried": {way.value: {} for way in BOTH}}
    if site.sizes.host != "gpu":
        return found
    begin = 1
    for way in BOTH:
        found["largest"][way.value] = begin = largest(_fits(way, site, found["tried"][way.value], say), begin, MOST)
    return found


def largest(fits: Callable[[int], bool], begin: int, most: int) -> int:
    """Return the largest size that fits of `begin` doubled again and again, or halved where that does not; 0 where none does.

    The search begins where that of another way ended: each answer is a launch.
    """
    size = max(1, begin)
    if fits(size):
        while size * 2 <= most and fits(size * 2):
            size *= 2
        return size
    while size > 1:
        size //= 2
        if fits(size):
            return size
    return 0


def _fits(way: Way, site: Site, tries: Found, say: Say) -> Callable[[int], bool]:
    def fits(size: int) -> bool:
        began = time.monotonic()
        name = f"micro-batch of {size}, {way.value}"
        batch = ["--micro-batch-size", str(size), "--global-batch-size", str(size), "--train-iters", str(STEPS)]
        run = tried(site, name, batch, overlays=way is Way.OVERLAYS)
        say(f"[{len(tries) + 1}] Megatron: {name}: {ended(run)}, {time.monotonic() - began:.0f} s")
        if "error" in run and not is_out_of_memory(run["error"]):
            raise ProofError(f"{name}: it ended otherwise than for want of memory: {run['error']}")
        tries[str(size)] = {key: run[key] for key in ("error", "losses", "peak_mib") if key in run}
        return "error" not in run

    return fits


def larger(found: Found) -> Verdict:
    """Judge the largest micro-batches, and say how much memory each took."""
    stock, ours = (found["largest"][way.value] for way in BOTH)
    figure = f"{_size(found, Way.OVERLAYS)}; stock: {_size(found, Way.STOCK)}"
    if stock and ours:
        figure += f"; {ours / stock:g} times as large"
    return Verdict.of(figure, holds=0 < ours >= stock)


def _size(found: Found, way: Way) -> str:
    size = found["largest"][way.value]
    if not size:
        return "not even one sample fits"
    more = ", the most that was tried" if size * 2 > found["most"] else ""
    return f"{size} ({found['tried'][way.value][str(size)]['peak_mib'] / 1024:.1f} GiB{more})"


CLAIMS = (
    Claim(
        "megatron-micro-batch",
        "with overlays the largest micro-batch that fits is stock's or larger",
        larger,
        asked=lambda found: bool(found["host"] == "gpu"),
    ),
)
