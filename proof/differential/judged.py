"""Judge each row of the table: stock and overlays against the truth, in terms of the rounding of the row's own dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from differential.rows import Row
from differential.table import ROWS

MARGIN = {"float32": 8.0, "float16": 4.0, "bfloat16": 4.0}
"""Ranks add in another order than one rank does: so many times the rounding of one rank in the same dtype is rounding, too.

Stock over NCCL was seen at 4.3 times in float32; defects are a thousand times as far there.
"""
LEAST = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}
"""Of a row in which one rank happens to round less than it may."""
SMALL = 1e-3
"""Of the largest gradient of a model: errors of smaller ones are measured by it, for they are differences of larger numbers."""


class Outcome(Enum):
    """How stock and overlays compare."""

    SAME = "the same bits"
    ROUNDING = "the same but for rounding"
    REPAIRED = "stock wrong, overlays right"
    HARMED = "STOCK RIGHT, OVERLAYS WRONG"
    BOTH = "BOTH WRONG"


GOOD = {Outcome.SAME, Outcome.ROUNDING, Outcome.REPAIRED}


@dataclass(frozen=True)
class JudgedRow:
    """One row."""

    row: Row
    outcome: Outcome
    limit: float
    stock: float
    ours: float
    worst: str
    """The number that is furthest from the truth, in units of rounding: of stock, or of overlays where stock is right."""
    error: str
    """With which stock or overlays end, if they do."""
    calls: dict[str, int]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "row": self.row.name,
            "ranks": self.row.ranks,
            "outcome": self.outcome.value,
            "rounding": self.limit,
            "stock": _finite(self.stock),
            "overlays": _finite(self.ours),
            "worst": self.worst,
            "error": self.error,
            "calls": {name: number for name, number in sorted(self.calls.items()) if number},
        }


def _finite(distance: float) -> float | None:
    return distance if math.isfinite(distance) else None


def judged(folder: Path, row: Row) -> JudgedRow:
    """Judge a row by the files of its sides in a folder.

    Raises:
        RuntimeError: the row has no truth.
    """
    at = ROWS.index(row)
    found = {side: _loaded(folder, side, at) for side in ("reference", "rounding", "stock", "overlays")}
    errors = {side: each for side, each in found.items() if isinstance(each, str)}
    for side in ("reference", "rounding"):
        if side in errors:
            raise RuntimeError(f"the row {row.name!r} has no {side}: {errors[side]}")
    truth = found["reference"]["numbers"]
    rounding = _distances(found["rounding"], truth)
    limits = {name: max(MARGIN[row.dtype] * each, LEAST[row.dtype]) for name, each in rounding.items()}
    stock, ours = (
        _worst({"": torch.inf} if side in errors else _distances(found[side], truth), limits)
        for side in ("stock", "overlays")
    )
    outcome = _outcome(found, stock.is_right, ours.is_right)
    error = "; ".join(f"{side}: {each}" for side, each in errors.items())
    calls = {} if "overlays" in errors else found["overlays"]["calls"]
    seconds = sum(each["seconds"] for each in found.values() if not isinstance(each, str))
    shown = ours if stock.is_right or not ours.is_right or "stock" in errors else stock
    at_worst = (
        _distances(found[side], truth).get(shown.name, 0.0) if side not in errors else torch.inf
        for side in ("stock", "overlays")
    )
    return JudgedRow(row, outcome, limits.get(shown.name, 0.0), *at_worst, shown.name, error, calls, seconds)


@dataclass(frozen=True)
class Worst:
    """The number that is furthest from the truth, in units of rounding."""

    name: str
    times: float

    @property
    def is_right(self) -> bool:
        """Whether that is rounding."""
        return self.times <= 1


def _worst(distances: dict[str, float], limits: dict[str, float]) -> Worst:
    return max(
        (Worst(name, each / limits.get(name, 1.0)) for name, each in distances.items()), key=lambda each: each.times
    )


def _outcome(found: dict[str, Any], stock_right: bool, ours_right: bool) -> Outcome:
    if any(isinstance(found[side], str) for side in ("stock", "overlays")) and ours_right == stock_right:
        return Outcome.BOTH
    if not ours_right:
        return Outcome.HARMED if stock_right else Outcome.BOTH
    if not stock_right:
        return Outcome.REPAIRED
    stock, ours = found["stock"]["numbers"], found["overlays"]["numbers"]
    same = stock.keys() == ours.keys() and all(torch.equal(each, ours[name]) for name, each in stock.items())
    return Outcome.SAME if same else Outcome.ROUNDING


def _loaded(folder: Path, side: str, at: int) -> Any:
    place = folder / f"{side} {at}.pt"
    if place.exists():
        return torch.load(place, weights_only=True)
    errors = [each.read_text().splitlines()[0] for each in sorted(folder.glob(f"{side} {at}.error.*"))]
    own = [each for each in errors if "Connection" not in each and "gloo" not in each and "NCCL" not in each]
    return (own or errors or ["its process ended without a word"])[0][:200]


REPLICAS = "replicas, from each other"


def _distances(found: Any, truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return how far each number is from the truth, of the largest value of its tensor."""
    floors = {kind: SMALL * _largest(truth, kind) for kind in ("gradient of", "step of")}
    distances = {REPLICAS: float(found["apart"])}
    for name, true in truth.items():
        floor = next((each for kind, each in floors.items() if name.startswith(kind)), 0.0)
        there = found["numbers"].get(name)
        if there is None and name.startswith(
            "gradient of"
        ):  # of a distributed optimizer: ranks keep a part each, and the step is of all
            continue
        scale = max(float(true.abs().max()), floor, 1e-12)
        distance = torch.inf if there is None else float((there - true).abs().max()) / scale
        distances[name] = torch.inf if distance != distance else distance
    return distances


def _largest(truth: dict[str, torch.Tensor], kind: str) -> float:
    return max((float(each.abs().max()) for name, each in truth.items() if name.startswith(kind)), default=0.0)
