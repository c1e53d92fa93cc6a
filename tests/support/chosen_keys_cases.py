"""Inputs of the indexer over chosen keys, and how far results are from the truth, shared by its tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megacpp_overlays.kernels.chosen_keys import reference


@dataclass(frozen=True)
class Sizes:
    """Of one case; packed documents begin every `document` queries."""

    queries: int
    keys: int
    batch: int
    heads: int
    """Of the indexer."""
    dim: int
    chosen: int
    attention_heads: int
    channels: int
    """Of attention."""
    document: int
    weights: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Inputs:
    """Of all four operators."""

    q: Any
    weights: Any
    k: Any
    starts: Any
    ends: Any
    query: Any
    key: Any
    grad: Any
    """(batch, queries, chosen), as the gradient of a softmax: it adds up to 0."""


def inputs(
    sizes: Sizes, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0, common: float = 0.0, device: str = "cpu"
) -> Inputs:
    """Return inputs that depend on nothing but a seed; `common` is the size of a part that all keys of the indexer share."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    s, t, b = sizes.queries, sizes.keys, sizes.batch
    rows = torch.arange(s)
    starts, ends = rows // sizes.document * sizes.document, rows + 1 + t - s
    if s > 3:
        starts[2] = ends[2]  # a query that sees nothing
    of_grad = normal(b, s, sizes.chosen).softmax(-1) - normal(b, s, sizes.chosen).softmax(-1)
    made = {
        "q": normal(s, b, sizes.heads, sizes.dim).to(dtype),
        "weights": normal(s, b, sizes.heads).to(sizes.weights),
        "k": (normal(t, b, sizes.dim) + common * normal(sizes.dim)).to(dtype),
        "query": normal(s, b, sizes.attention_heads, sizes.channels).to(dtype),
        "key": normal(t, b, 1, sizes.channels).to(dtype),
    }
    moved = {name: each.to(device) for name, each in made.items()}
    return Inputs(starts=starts.to(device), ends=ends.to(device), grad=of_grad.to(device), **moved)


def error(found: Any, true: Any) -> float:
    """Return the distance from the truth, relative, in the Euclidean norm."""
    size = true.double().norm().item()
    return float((found.double() - true.double()).norm().item() / (size or 1.0))


def true_gradients(made: Inputs, indices: Any, use_relu: bool) -> tuple[Any, ...]:
    """Return the gradients of q, weights and k in float64."""
    wide = (each.double() for each in (made.q, made.weights, made.k))
    return reference.gradients(made.grad.double(), indices, *wide, use_relu)
