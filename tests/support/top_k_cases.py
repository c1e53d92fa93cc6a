"""Rows of numbers for the top-k, and the numbers that it must choose, shared by its tests."""

from __future__ import annotations

import math
from typing import Any

import torch

KINDS = (
    "normal",
    "whole",
    "one number",
    "causal",
    "nothing finite",
    "infinities",
    "NaNs",
    "zeros",
    "subnormal",
    "sorted",
    "powers",
    "outliers",
    "largest",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rows(kind: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """Return scores of a kind, which depend on nothing but a seed."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator)
    keys = shape[-1]
    if kind == "whole":
        numbers = (2 * numbers).round()
    elif kind == "one number":
        numbers = numbers[..., :1].expand(shape).clone()
    elif kind == "causal":
        rows = torch.arange(shape[-2])[:, None] * keys // max(1, shape[-2])
        numbers = numbers.masked_fill(torch.arange(keys) > rows, -torch.inf)
    elif kind == "nothing finite":
        numbers = torch.full(shape, -torch.inf)
    elif kind == "infinities":
        numbers = numbers.masked_fill(numbers > 1, torch.inf).masked_fill(numbers < -1, -torch.inf)
    elif kind == "NaNs":
        signs = torch.tensor([0x7FC00000, -0x400000, 0x7F800001], dtype=torch.int32).view(torch.float32)
        which = torch.randint(0, 3, shape, generator=generator)
        numbers = torch.where(numbers > 0.5, signs[which], numbers)
    elif kind == "zeros":
        numbers = numbers.sign() * (numbers.abs() > 1.5)
        numbers = torch.where(
            numbers == 0, torch.where(torch.rand(shape, generator=generator) > 0.5, 0.0, -0.0), numbers
        )
    elif kind == "subnormal":
        numbers = numbers * 1e-44 if dtype == torch.float32 else numbers * torch.finfo(dtype).tiny / 50
    elif kind == "sorted":
        numbers = numbers.sort(dim=-1).values
    elif kind == "powers":  # as far apart as exponents let them be
        numbers = numbers.sign() * torch.finfo(dtype).max ** (numbers.abs().clamp(max=4) / 4) / 1e4
    elif kind == "outliers":
        numbers[..., :1], numbers[..., -1:] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    elif kind == "largest":  # differences are no numbers
        numbers = numbers.sign() * torch.finfo(dtype).max * (1 - numbers.abs().clamp(max=4) / 10)
    return numbers.to(dtype).to(device)


def chosen(row: list[float], k: int, *, mark_infinite: bool = False) -> list[int]:
    """Return the numbers that are chosen of one row: the definition, number by number."""
    numbers = [math.inf if math.isnan(number) else number for number in row]
    places = sorted(sorted(range(len(row)), key=lambda at: (-numbers[at], at))[:k])
    if not mark_infinite:
        return places
    finite = [at for at in places if numbers[at] != -math.inf]
    return finite + [-1] * (k - len(finite))


def definition(scores: Any, k: int, *, mark_infinite: bool = False) -> Any:
    """Return the same of every row, as a tensor."""
    found = [
        chosen(row, k, mark_infinite=mark_infinite) for row in scores.double().reshape(-1, scores.size(-1)).tolist()
    ]
    return torch.tensor(found, dtype=torch.int64).view(*scores.shape[:-1], k)


def some_of(keys: int) -> list[int]:
    """Return numbers of choices: none, one, half of the keys, all but one, and all."""
    return sorted({0, min(1, keys), keys // 2, max(0, keys - 1), keys})
