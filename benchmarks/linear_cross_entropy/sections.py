"""The sections of the benchmark of linear cross entropy: each measures one thing at one shape and returns plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import timing
import torch
from linear_cross_entropy.goals import EAGER, OURS, ROUNDED, UNMASKED
from linear_cross_entropy.peers import reason
from linear_cross_entropy.truth import errors, from_plain, rounded, truth_of
from linear_cross_entropy.work import (
    Data,
    Shape,
    Way,
    compiled,
    floors,
    labelled_alone,
    make_data,
    selecting,
    skipping,
    unmasked,
    with_labels,
)
from progress import say

LABELS = ("uniform", "zipf")
SHARES = (0.5, 0.25, 0.1, 1.0)
"""Of tokens with a label."""
WRONG = 0.05
"""An error of a gradient, norm over norm, that no rounding explains."""
LARGER_THAN_L2 = 256 << 20


@dataclass
class Bench:
    """Settings of every section."""

    device: str
    quick: bool
    rounds: int
    burst_ms: float
    limit_s: float
    ways: list[Way]
    compiles: bool
    """Whether plain PyTorch runs compiled, too."""
    notes: list[str]
    failed: dict[Shape, set[tuple[str, str]]] = field(default_factory=dict)
    """Names and reductions of ways that failed at a shape, and do not race there."""
    compiled: dict[Shape, list[Way]] = field(default_factory=dict)

    def ways_at(self, shape: Shape, reduction: str) -> list[Way]:
        """Return the ways for one reduction."""
        if self.compiles and shape not in self.compiled:
            self.compiled = {shape: compiled()}
        every = [*self.ways, *self.compiled.get(shape, ())]
        return [way for way in every if way.reduction == reduction]


def accuracy(bench: Bench, shape: Shape) -> dict[str, Any]:
    """Errors against float64 for two kinds of labels, and who refuses: the first run of everything, too.

    Every way runs here before it races, because an error or a compilation must not meet the others in the race.
    """
    bench.failed[shape] = set()
    found: dict[str, Any] = {}
    for labels in LABELS:
        data = make_data(shape, labels, bench.device)
        for reduction in ("none", "mean"):
            true, plain = truth_of(data, reduction), Plain()
            rows = found.setdefault(reduction, {}).setdefault(labels, {})
            rows[ROUNDED] = {"errors": rounded(true, data.weight.dtype), "right": True}
            for way in bench.ways_at(shape, reduction):
                rows[way.name] = accuracy_of(bench, shape, way, data, true, plain)
                timing.clear(bench.device)
            del true, plain
        del data
    return found


@dataclass
class Plain:
    """The gradients of plain PyTorch, which is the first way of all."""

    gradients: Any = None


def accuracy_of(bench: Bench, shape: Shape, way: Way, data: Data, true: Any, plain: Plain) -> dict[str, Any]:
    """Return the errors of one way, and how far its gradients are from those of plain PyTorch; or its exception."""
    key = (way.name, way.reduction)
    if key in bench.failed[shape]:
        return {"failed": "as before"}
    say(f"      {way.name}, {way.reduction}")
    try:
        forward, backward = way.stages(data)
        losses = forward()
        gradients = backward(losses)
        timing.settle(bench.device)
    except Exception as error:  # noqa: BLE001 - whatever a peer raises
        bench.failed[shape].add(key)
        return {"failed": reason(error), "options": sorted(way.options)}
    found = errors(losses, gradients, true)
    if way.name == EAGER:
        plain.gradients = gradients
    if plain.gradients is not None:
        found |= from_plain(gradients, plain.gradients)
    apart = max(found[name]["norm"] for name in ("x", "weight"))
    right = apart < WRONG  # not for a NaN
    return {"errors": found, "right": right, "options": sorted(way.options)}


def none(bench: Bench, shape: Shape) -> dict[str, Any]:
    """Time and memory with a loss for each token, under a random mask with random weights."""
    return raced(bench, shape, "none", make_data(shape, "uniform", bench.device))


def mean(bench: Bench, shape: Shape) -> dict[str, Any]:
    """Time and memory of the mean; and of ours without a reduction on the same data, nothing masked."""
    data = make_data(shape, "uniform", bench.device)
    data = replace(data, incoming=torch.full_like(data.incoming, 1 / shape.tokens))
    return raced(bench, shape, "mean", data)


def labelled(bench: Bench, shape: Shape) -> Iterator[dict[str, Any]]:
    """Yield time and memory of the mean where some tokens have a label, and where all have one; peers get those alone."""
    whole = make_data(shape, "uniform", bench.device)
    bench = replace(bench, burst_ms=bench.burst_ms / 2, limit_s=bench.limit_s / 2)  # there are four races
    for share in SHARES:
        yield labelled_share(bench, shape, whole, share)


def labelled_share(bench: Bench, shape: Shape, whole: Data, share: float) -> dict[str, Any]:
    """Return the race at one share of labelled tokens, with the errors of everybody in it."""
    say(f"   {share:.0%} labelled, {SHARES.index(share) + 1} of {len(SHARES)}")
    data = with_labels(whole, share)
    alone = labelled_alone(data)
    failed = bench.failed.setdefault(shape, set())
    ways = {each.name: each for each in skipping()}
    for way in {each.name: each for reduction in ("none", "mean") for each in bench.ways_at(shape, reduction)}.values():
        if way.kind != "ours" and (way.name, way.reduction) not in failed:
            one = selecting(way)
            ways[one.name] = one
    true, plain, rows = truth_of(data, "mean"), Plain(), {}
    for name, way in list(ways.items()):
        rows[name] = accuracy_of(bench, shape, way, data, true, plain)
        if "failed" in rows[name]:
            bench.notes.append(f"{name} at {shape}, {share:.0%} labelled: {rows[name]['failed']}")
            del ways[name]
        timing.clear(bench.device)
    del true, plain
    found = race_of(bench, shape, floors(alone, "mean"), ways, data)
    for name, row in found["rows"].items():
        row["errors"] = rows.get(name, {}).get("errors", {})
    return {"labelled": alone.target.numel(), **found}


def raced(bench: Bench, shape: Shape, reduction: str, data: Data) -> dict[str, Any]:
    """Race the floors and all ways of a reduction, with a warm and a cold cache, and look at their memory."""
    failed = bench.failed.get(shape, set())
    ways = {way.name: way for way in bench.ways_at(shape, reduction) if (way.name, reduction) not in failed}
    if reduction == "mean":
        ways[UNMASKED] = unmasked()
    return race_of(bench, shape, floors(data, reduction), ways, data)


def race_of(
    bench: Bench,
    shape: Shape,
    products: dict[str, timing.Stages],
    ways: dict[str, Way],
    data: Data,
) -> dict[str, Any]:
    """Race floors and ways, with a warm and a cold cache, and look at the memory of the ways."""
    contestants = products | {name: way.stages(data) for name, way in ways.items()}
    scratch = torch.empty(1 if bench.device == "cpu" else LARGER_THAN_L2, dtype=torch.int8, device=bench.device)
    rows: dict[str, dict[str, Any]] = {
        name: {"kind": ways[name].kind if name in ways else "floor"} for name in contestants
    }
    burst_ms = 1.0 if bench.quick else bench.burst_ms
    clocks: dict[str, str] | None = None
    for cache, before_each in (("warm", None), ("cold", scratch.zero_)):
        say(f"      {len(contestants)} ways take turns, {cache} cache")
        retries = retried(bench.device)
        times = timing.race(
            contestants, bench.device, rounds=bench.rounds, burst_ms=burst_ms, before_each=before_each,
            limit_s=bench.limit_s,
        )  # fmt: skip
        clocks = clocks or clocks_under(bench, contestants[OURS], times[OURS]["ms"])
        if (more := retried(bench.device) - retries) and all(times.values()):
            bench.notes.append(f"{more} retries of the allocator while {shape} raced, {cache} cache")
        for name, taken in times.items():
            rows[name][cache] = taken
    del scratch
    for name in products:  # they hold gigabytes
        del contestants[name]
    products.clear()
    outputs = timing.mib(data.x, data.weight)
    for name, way in ways.items():
        losses = 4 * (shape.tokens if way.reduction == "none" else 1) / 2**20
        peak = timing.extra_mib(contestants[name], bench.device) if rows[name]["warm"] else None
        rows[name]["host_ms"] = timing.host_ms(contestants[name], bench.device) if rows[name]["warm"] else None
        rows[name]["extra_mib"] = None if peak is None else max(0.0, peak - outputs - losses)
    return {"rows": rows, "outputs_mib": outputs, "clocks": clocks}


def retried(device: str) -> int:
    """Return how often the allocator had to give memory back."""
    return 0 if device == "cpu" else int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def clocks_under(bench: Bench, stages: timing.Stages, once_ms: float) -> dict[str, str] | None:
    """Return clock, power and temperature of the GPU while our kernel keeps it busy."""
    if bench.device == "cpu":
        return None
    fields = ("clocks.sm", "clocks.max.sm", "power.draw", "temperature.gpu")
    for _ in range(math.ceil(800 / max(1.0, once_ms))):
        timing.marked(stages, bench.device)
    found = dict(zip(fields, timing.ask_driver(*fields), strict=True))
    timing.settle(bench.device)
    return found
