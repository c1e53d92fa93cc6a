"""Workload of the benchmark of index scores: sizes, inputs, and the same work done in several ways."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import timing
import torch

from megacpp_overlays.kernels.index_scores import function as index_scores
from megacpp_overlays.kernels.index_scores import streaming as index_scores_streaming

Contestants = dict[str, timing.Stages]


@dataclass(frozen=True)
class Shape:
    """Sizes of the indexer."""

    queries: int
    keys: int
    batch: int
    heads: int
    dim: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Return the shape that `QUERIESxKEYSxBATCHxHEADSxDIM` says."""
        return cls(*map(int, text.split("x")))

    @property
    def flops(self) -> int:
        """Operations of the products, which are nearly all of the forward's."""
        return 2 * self.queries * self.keys * self.batch * self.heads * self.dim


@dataclass
class Bench:
    """Settings of every section, and the results."""

    device: str
    quick: bool
    rounds: int
    limit_s: float
    topk: int
    main_heads: tuple[int, ...]
    main_dim: int
    largest_batch: int
    before: ModuleType
    """Megatron's module as it is; None where there is none."""
    after: ModuleType
    """The same with the overlay active; None where it is not."""
    found: dict[str, Any]

    def race(self, contestants: Contestants, **options: Any) -> dict[str, Any]:
        """Time contestants, see `timing.race`; say so when the allocator had to give memory back meanwhile."""
        before = self._retries()
        times = timing.race(contestants, self.device, **{"rounds": self.rounds, "limit_s": self.limit_s} | options)
        if all(times.values()) and (retries := self._retries() - before):
            self.found["notes"].append(f"{retries} retries of the allocator while {', '.join(times)} raced")
        return times

    def _retries(self) -> int:
        return 0 if self.device == "cpu" else torch.cuda.memory_stats().get("num_alloc_retries", 0)

    def normal(self, *size: int) -> Any:
        """Return random bfloat16."""
        return torch.randn(size, device=self.device, dtype=torch.bfloat16)

    def inputs(self, shape: Shape) -> tuple[Any, Any, Any]:
        """Return random q, weights and k."""
        return (
            self.normal(shape.queries, shape.batch, shape.heads, shape.dim),
            self.normal(shape.queries, shape.batch, shape.heads),
            self.normal(shape.keys, shape.batch, shape.dim),
        )

    def rows(self, contestants: Contestants, **options: Any) -> dict[str, dict[str, Any]]:
        """Return time and memory of each; `ms` is None for one that does not fit."""
        times = self.race(contestants, **options)
        nothing = {"ms": None, "stages": None, "calls": 0}
        return {
            name: (times[name] or nothing)
            | {"extra_mib": timing.extra_mib(stages, self.device) if times[name] else None}
            for name, stages in contestants.items()
        }


def copy_of(module: ModuleType) -> ModuleType:
    """Return a module loaded once more from its file, under a name that no hook watches: as it is, without overlays."""
    spec = importlib.util.spec_from_file_location(f"copy_of_{module.__name__}", module.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def ways(bench: Bench) -> dict[str, Callable[..., Any]]:
    """Return the functions from q, weights and k to the scores."""
    upstream = bench.before._compute_index_scores  # noqa: SLF001 - the measured function
    return {
        "upstream": upstream,
        "head by head": head_by_head,
        "streaming": lambda *inputs: index_scores_streaming.scores(*inputs, use_relu=True),
        "torch.compile": torch.compile(upstream, dynamic=False),
        "kernel": index_scores.scores,
    }


def head_by_head(q: Any, weights: Any, k: Any) -> Any:
    """Return the scores as a first repair would: float32 products of one head at a time, added up."""
    keys = k.permute(1, 2, 0).float()
    total = torch.zeros(q.size(1), q.size(0), k.size(0), device=q.device)
    for head in range(q.size(2)):
        products = torch.bmm(q[:, :, head].transpose(0, 1).float(), keys)
        total += torch.relu(products) * weights[:, :, head].t().unsqueeze(-1)
    return total


def matrix_products(bench: Bench, shape: Shape) -> tuple[Contestants, dict[str, int]]:
    """Return bf16 products, a cube and one with the operations of the work, which may be the same; and operations."""
    side = 128 if bench.quick else 8192
    products, flops = {}, {}
    for depth in sorted({side, max(1, round(shape.flops / (2 * side * side)))}):
        name = f"matmul {side} x {side} x {depth}"
        left, right = bench.normal(side, depth), bench.normal(depth, side)
        products[name] = (lambda left=left, right=right: left @ right,)
        flops[name] = 2 * side * side * depth
    return products, flops


def autograd_contestants(bench: Bench, shape: Shape) -> tuple[Contestants, list[Any], Any]:
    """Return stages forward and backward, the leaves, and the gradient that arrives."""
    leaves = [each.requires_grad_() for each in bench.inputs(shape)]
    grad = torch.randn(shape.batch, shape.queries, shape.keys, device=bench.device)
    functions = ways(bench)

    def through(way: Callable[..., Any]) -> timing.Stages:
        return (lambda: way(*leaves), lambda scores: torch.autograd.grad(scores, leaves, grad))

    def streaming() -> Any:
        return index_scores_streaming.scores(*(leaf.detach() for leaf in leaves), use_relu=True)

    def streamed(_scores: Any) -> Any:
        return index_scores_streaming.gradients(grad, *(leaf.detach() for leaf in leaves), use_relu=True)

    return (
        {"upstream": through(functions["upstream"]), "streaming": (streaming, streamed), "kernel": through(functions["kernel"])},
        leaves,
        grad,
    )  # fmt: skip


def loss_inputs(bench: Bench, shape: Shape, heads: int) -> dict[str, Any]:
    """Return the arguments of the fused indexer loss, by name: random inputs, a causal mask, one rank."""
    q, weights, k = bench.inputs(shape)
    blocked = torch.full((shape.queries, shape.keys), -torch.inf, device=bench.device)
    return {
        "q": q,
        "weights": weights,
        "k": k,
        "query": bench.normal(shape.queries, shape.batch, heads, bench.main_dim),
        "key": bench.normal(shape.keys, shape.batch, heads, bench.main_dim),
        "softmax_scale": bench.main_dim**-0.5,
        "topk": bench.topk,
        "loss_coeff": 0.01,
        "sparse_loss": True,
        "mask": torch.triu(blocked, diagonal=1 + shape.keys - shape.queries),
        "pg_collection": SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)),
    }


def positional(order: Any, values: dict[str, Any]) -> list[Any]:
    """Return the values in the order of a signature, whose later parameters have defaults."""
    return [values[name] for name in order if name in values]


def step_contestants(bench: Bench, shape: Shape) -> Contestants:
    """Return stages forward and backward."""
    values = loss_inputs(bench, shape, bench.main_heads[-1])
    leaves = [values[name].requires_grad_() for name in ("q", "weights", "k")]

    def through(module: ModuleType) -> timing.Stages:
        fused = module.FusedDSAIndexerLoss
        inputs = positional(list(inspect.signature(fused.forward).parameters)[1:], values)
        return (lambda: fused.apply(*inputs), lambda both: torch.autograd.grad(both[1], leaves))

    return {"before": through(bench.before), "after": through(bench.after)}
