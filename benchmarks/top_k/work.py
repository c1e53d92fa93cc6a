"""Workload of the benchmark of the top-k: sizes, rows of scores, and implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import timing
import torch
from top_k.page import FLOOR

from megacpp_overlays.kernels.top_k import function as top_k

KINDS = ("normal", "causal", "whole")
"""Numbers that differ; the same above a diagonal of negative infinity; whole numbers, so that many are equal."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the scores, and how many are chosen of each row."""

    rows: int
    keys: int
    k: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Return the shape that `ROWSxKEYSxK` says."""
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return f"{self.rows}x{self.keys}x{self.k}"

    @property
    def moved(self) -> int:
        """Bytes that must be read and written: float32 scores, int64 positions."""
        return self.rows * (4 * self.keys + 8 * self.k)


def scores(shape: Shape, kind: str, device: str) -> Any:
    """Return random scores of a kind, float32."""
    numbers = torch.randn(shape.rows, shape.keys, device=device)
    if kind == "whole":
        numbers = (8 * numbers).round()
    if kind == "causal":
        last = torch.arange(shape.rows, device=device)[:, None] % shape.keys
        numbers.masked_fill_(torch.arange(shape.keys, device=device) > last, -torch.inf)
    return numbers


def contestants(numbers: Any, shape: Shape) -> dict[str, timing.Stages]:
    """Return who chooses, and a copy that reads half of the bytes and writes the other half."""
    source = torch.zeros(shape.moved // 2, dtype=torch.uint8, device=numbers.device)
    target = torch.empty_like(source)
    return {
        "torch.topk": (lambda: numbers.topk(shape.k, dim=-1)[1],),
        "torch.topk, sorted=False": (lambda: numbers.topk(shape.k, dim=-1, sorted=False)[1],),
        "choose": (lambda: top_k.choose(numbers, shape.k),),
        "choose, mark_infinite": (lambda: top_k.choose(numbers, shape.k, mark_infinite=True),),
        FLOOR: (lambda: target.copy_(source),),
    }


def is_right(numbers: Any, shape: Shape) -> bool:
    """Return whether the chosen positions have the numbers that torch chooses."""
    chosen = numbers.gather(-1, top_k.choose(numbers, shape.k)).sort(dim=-1, descending=True).values
    return torch.equal(chosen, numbers.topk(shape.k, dim=-1).values)
