"""Losses of sharded logits under torch's `loss_parallel`: are their gradients those of whole logits?

Two ranks are forked and meet with gloo. Each has half of the classes. Compared are gradients of logits with those that the same loss has of whole ones, in float64.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, on_ranks

OVERLAY = "loss-parallel-log-softmax"
MODULE = "torch.distributed.tensor.parallel.loss"
RANKS, ROWS, CLASSES = 2, 6, 10
TOLERANCE = 1e-6


def _distillation(logits: Any, teacher: Any, _labels: Any) -> Any:
    return -(teacher.softmax(-1) * _log_softmax(logits)).sum()


def _entropy(logits: Any, _teacher: Any, _labels: Any) -> Any:
    found = _log_softmax(logits)
    return (found.exp() * found).sum()


def _cross_entropy(logits: Any, _teacher: Any, labels: Any, **options: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(logits, labels, **options)


def _mixed(logits: Any, teacher: Any, labels: Any) -> Any:
    import torch

    found = _log_softmax(logits)
    return torch.nn.functional.nll_loss(found, labels) + 0.5 * (found.exp() * found).sum()


def _log_softmax(logits: Any) -> Any:
    import torch

    return torch.nn.functional.log_softmax(logits, -1)


LOSSES: Mapping[str, Callable[..., Any]] = {"distillation": _distillation, "entropy": _entropy, "cross entropy and entropy": _mixed}


def _run() -> Behaviour:
    found = gradients(LOSSES)
    off = {name: apart(found, name) for name in LOSSES}
    words = ", ".join(f"{name} {each:.1e}" for name, each in off.items())
    return Behaviour(broken=max(off.values()) > TOLERANCE, seen=f"gradients of logits on {RANKS} ranks are off by: {words}")


def apart(found: Mapping[str, list[float]], name: str) -> float:
    """Return how far gradients of a loss are off on all ranks, relative to the largest right one."""
    off, right = ([each for key, values in found.items() if key.endswith(f"{name}{end}") for each in values] for end in ("", ", right"))
    return max(abs(one - other) for one, other in zip(off, right, strict=True)) / max(map(abs, right))


def gradients(losses: Mapping[str, Callable[..., Any]], dtype: str = "float64", *, is_parallel: bool = True) -> dict[str, list[float]]:
    """Return the gradients of a rank's logits by loss, and the right ones.

    Args:
        losses: each of logits, logits of a teacher, and labels.
        dtype: of logits.
        is_parallel: whether passes run under `loss_parallel`.
    """
    for each in (MODULE, "torch._dynamo"):  # ranks are forked, and the first DTensor imports the second
        importlib.import_module(each)
    return on_ranks(RANKS, functools.partial(_gradients, losses, dtype, is_parallel))


def _gradients(losses: Mapping[str, Callable[..., Any]], dtype: str, is_parallel: bool, rank: int) -> Mapping[str, Any]:
    import contextlib

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    mesh, found = init_device_mesh("cpu", (RANKS,)), {}
    made = torch.Generator().manual_seed(60)
    whole, teacher = (torch.randn(ROWS, CLASSES, generator=made, dtype=torch.float64).to(getattr(torch, dtype)) for _ in range(2))
    labels = torch.randint(CLASSES, (ROWS,), generator=made)
    for name, loss in losses.items():
        plain = whole.clone().requires_grad_()
        loss(plain, teacher, labels).backward()
        sharded = distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_()
        with loss_parallel() if is_parallel else contextlib.nullcontext():
            value = loss(sharded, distribute_tensor(teacher, mesh, [Shard(1)]), labels)
            value.backward()
        found[name] = sharded.grad.redistribute(mesh, [Shard(1)]).to_local()
        found[f"{name}, right"] = plain.grad.chunk(RANKS, dim=1)[rank]
    return found


CASES = (Case(name="losses-cpu", overlay=OVERLAY, device="cpu", versions=("torch",), run=_run),)
