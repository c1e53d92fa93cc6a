"""Problems of attention over chosen keys, and who solves them."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timing
import torch
from sparse_attention import peers

from megacpp_overlays.kernels.sparse_attention import function, reference
from megacpp_overlays.kernels.sparse_attention.quantized_keys import QuantizedKeys

FP8 = "ours, FP8 keys"
MEGATRON = "megatron.core.transformer.experimental_attention_variant"


@dataclass(frozen=True)
class Shape:
    """Sizes of one problem; every query chooses `slots` of the keys, at random."""

    queries: int
    keys: int
    heads: int
    dim: int
    value: int
    slots: int = 2048

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read QUERIESxKEYSxHEADSxDIMxVALUE, or with xSLOTS behind it."""
        return cls(*(int(each) for each in text.split("x")))

    def __str__(self) -> str:
        """Name the sizes that a reader compares."""
        return f"{self.queries} queries, {self.keys} keys, {self.heads} heads, {self.dim}/{self.value}, {self.slots} chosen"

    @property
    def forward_flops(self) -> int:
        """Of the two products."""
        return 2 * self.queries * self.slots * self.heads * (self.dim + self.value)

    @property
    def backward_flops(self) -> int:
        """Of the five products, the scores once more among them."""
        return 2 * self.queries * self.slots * self.heads * (3 * self.dim + 2 * self.value)


@dataclass(frozen=True)
class Problem:
    """Inputs of one shape."""

    shape: Shape
    query: torch.Tensor
    key: torch.Tensor
    indices: torch.Tensor
    above: torch.Tensor
    quantized: QuantizedKeys
    """The keys as FP8 numbers with a scale each, whose gradient goes to `key`."""

    @property
    def scale(self) -> float:
        """Factor of the products."""
        return self.shape.dim**-0.5


def problem(shape: Shape, device: str) -> Problem:
    """Make inputs, bfloat16, on the device."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(torch.bfloat16)

    indices = torch.empty((1, shape.queries, shape.slots), dtype=torch.int32, device=device)
    for start in range(0, shape.queries, 512):
        rows = indices[:, start : start + 512]
        rows.copy_(
            torch.rand((1, rows.size(1), shape.keys), generator=generator, device=device).topk(shape.slots).indices
        )
    query, key = normal(shape.queries, 1, shape.heads, shape.dim), normal(shape.keys, 1, 1, shape.dim)
    above = normal(shape.queries, 1, shape.heads, shape.value)
    key_scale = key.float().abs().amax(dim=3) / torch.finfo(torch.float8_e4m3fn).max
    data = (key / key_scale[..., None]).to(torch.float8_e4m3fn)
    quantized = QuantizedKeys(data, key_scale[..., 0], key.requires_grad_())
    return Problem(shape, query.requires_grad_(), key, indices, above, quantized)


Attend = Callable[[Problem], torch.Tensor]


def ours(each: Problem) -> torch.Tensor:
    """Return the output of the kernels."""
    return function.attend(each.query, each.key, each.indices, each.scale, each.shape.value)[0]


def ours_of_quantized(each: Problem) -> torch.Tensor:
    """Return the output of the kernels for keys that are stored as FP8 numbers."""
    return function.attend(each.query, each.quantized, each.indices, each.scale, each.shape.value)[0]


def megatron(name: str, symbol: str) -> Callable[..., Any] | None:
    """Return a function of Megatron, or None where it or one of its requirements is not installed."""
    try:
        return getattr(importlib.import_module(f"{MEGATRON}.{name}"), symbol)
    except (ImportError, OSError, AttributeError):
        return None


def contestants(shape: Shape, example: Path | None = None) -> dict[str, Attend]:
    """Return who takes a shape, by name; `example` is a file, see `peers`."""
    found: dict[str, Attend] = {"ours": ours, FP8: ours_of_quantized}
    unfused = megatron("dsa", "_unfused_absorbed_dsa_fn")
    dispatch = megatron("ops.tilelang_dsa", "fused_sparse_mla_absorbed")
    compiled = megatron("ops.sparse_mla", "SparseMLA")
    if unfused is not None:

        def none(each: Problem) -> torch.Tensor:
            rows = torch.zeros(each.shape.queries, dtype=torch.int64, device=each.query.device)
            bounds = {"varlen_starts": rows, "varlen_ends": rows + shape.keys}
            result: torch.Tensor = unfused(each.query, each.key, each.indices, each.scale, shape.value, **bounds)
            return result

        found["Megatron, none"] = none
    if None not in {dispatch, compiled} and (shape.dim, shape.value) == peers.DIMENSIONS:

        def tilelang(each: Problem) -> torch.Tensor:
            result: torch.Tensor = dispatch(each.query, each.key, each.indices, each.scale, shape.value)
            return result

        found["Megatron, tilelang"] = tilelang
    return found | peers.forward_passes(shape, example)


def stages(name: str, attend: Attend, each: Problem) -> timing.Stages:
    """Return the forward and the backward pass of a contestant, if it has one."""
    if name in peers.FORWARD_ALONE:
        return (lambda: attend(each),)
    return (
        lambda: attend(each),
        lambda output: torch.autograd.grad(output, (each.query, each.key), each.above),
    )


def floors(each: Problem) -> dict[str, timing.Stages]:
    """Return bare work: the products of each pass on dense tensors of the same sizes, and a gather of all chosen keys."""
    shape, some = each.shape, 256
    rows = min(some, shape.queries)
    query, above = each.query[:rows, 0].detach(), each.above[:rows, 0]
    chosen = each.key[:, 0, 0].detach()[each.indices[0, :rows].long()]
    values, weights = chosen[..., : shape.value], query.new_zeros((rows, shape.heads, shape.slots))
    times = shape.queries // rows

    def forward() -> None:
        for _ in range(times):
            torch.bmm(query, chosen.mT)
            torch.bmm(weights, values)

    def backward(_: None) -> None:
        for _ in range(times):
            torch.bmm(query, chosen.mT)
            torch.bmm(above, values.mT)
            torch.bmm(weights, chosen)
            torch.bmm(weights.mT, query)
            torch.bmm(weights.mT, above)

    flat, space = each.indices[0, :rows].long().reshape(-1), torch.empty_like(chosen).view(-1, shape.dim)

    def gather() -> None:
        for _ in range(times):
            torch.index_select(each.key[:, 0, 0].detach(), 0, flat, out=space)

    return {"bare products": (forward, backward), "a gather of the keys": (gather,)}


def errors(name: str, attend: Attend, each: Problem, queries: int = 32) -> dict[str, float]:
    """Return how far output and gradients, if there are any, of some queries are from float64, norms of differences over norms.

    The truth of quantized keys is that of the numbers that they stand for.
    """
    some = dataclasses.replace(
        each,
        shape=dataclasses.replace(each.shape, queries=queries),
        query=each.query.detach()[:queries].requires_grad_(),
        indices=each.indices[:, :queries].contiguous(),
        above=each.above[:queries],
    )
    forward, *backward = stages(name, attend, some)
    output = forward()
    found = (output, *(gradient for step in backward for gradient in step(output)))
    key = some.quantized.opened(torch.float64) if name == FP8 else some.key.double()
    wide = [tensor.detach().double().requires_grad_() for tensor in (some.query, key)]
    true, _ = reference.attend(*wide, some.indices, some.scale, some.shape.value)
    truth = (true, *(torch.autograd.grad(true, wide, some.above.double()) if backward else ()))
    with torch.no_grad():
        far = [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, truth, strict=True)]
    return dict(zip(("output", "of query", "of key")[: len(far)], far, strict=True))
