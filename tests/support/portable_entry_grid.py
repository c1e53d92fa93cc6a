"""Run in a fresh interpreter: many calls of Megatron's `linear_cross_entropy`, errors against float64 as JSON.

    PORTABLE_ENTRY='{"device": "cpu", "scale": 1, "cases": ["none"]}' python tests/support/portable_entry_grid.py

Megatron is the tree that is first on the path. On a GPU its dispatcher decides, with the overlay. On the CPU, where it
refuses to work, its autograd function is given the portable entry, and TRITON_INTERPRET must be set outside.
With "ranks" in the request, this is one rank of a tensor-parallel group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from portable_entry_cases import CASES, LARGE, PARALLEL, Case

import megacpp_overlays
from megacpp_overlays.kernels.linear_cross_entropy import entry
from megacpp_overlays.kernels.linear_cross_entropy import products as linear_cross_entropy_products

# isort: split
from megatron.core.fusions import fused_linear_cross_entropy as upstream

FORWARD_SPLIT, BACKWARD_SPLIT = "LCE_FWD_VOCAB_SPLIT_SIZE", "LCE_BWD_VOCAB_SPLIT_SIZE"


@dataclasses.dataclass
class Place:
    """Where this process computes."""

    device: str
    scale: int = 1
    rank: int = 0
    ranks: int = 1
    group: Any = None


def inputs(case: Case, place: Place) -> tuple[Any, Any, Any]:
    """Return hidden states, weight and labels of all ranks, on the CPU, rounded to the dtype of the case."""
    generator = torch.Generator().manual_seed(10)
    scale = place.scale
    tokens = case.tokens * (scale if case.tokens > 1 else 1)
    size, classes = case.hidden * scale, case.classes * scale * place.ranks
    shape = (tokens, case.batch) if case.batch else (tokens,)
    hidden = torch.randn(*shape, size, generator=generator)
    weight = torch.randn(classes, size, generator=generator) * 3 / size**0.5
    if case.shift:
        hidden[..., 0], weight[:, 0] = 1.0, case.shift
    labels = torch.randint(0, classes, shape, generator=generator)
    flat = labels.view(-1)
    if case.outside:
        flat[2], flat[3] = classes + 3, -7
    for first in case.ignored:
        flat[slice(None) if first == -1 else slice(first, None, 7)] = case.ignore_index
    dtype = getattr(torch, case.dtype)
    return hidden.to(dtype), weight.to(dtype), labels.to(getattr(torch, case.label_dtype))


def truth(case: Case, hidden: Any, weight: Any, labels: Any, arriving: Any) -> tuple[Any, Any, Any]:
    """Return loss, gradient of the hidden states and of the weight in float64, written out."""
    rows, flat = hidden.double().flatten(0, -2), labels.long().flatten()
    logits = rows @ weight.double().t()
    kept = flat != case.ignore_index
    known = (flat >= 0) & (flat < weight.shape[0])
    column = torch.where(known, flat, 0).unsqueeze(1)
    losses = torch.logsumexp(logits, dim=1) - logits.gather(1, column).squeeze(1) * known
    losses = torch.where(kept, losses, 0)
    scale = torch.where(kept, arriving.double().expand(flat.shape), 0)
    loss = losses if case.reduction == "none" else losses.sum()
    if case.reduction == "mean":
        loss, scale = loss / kept.sum(), scale / kept.sum()
    slope = torch.softmax(logits, dim=1)
    slope.scatter_add_(1, column, -known.double().unsqueeze(1))
    slope *= scale.unsqueeze(1)
    return loss, (slope @ weight.double()).view(hidden.shape), slope.t() @ rows


def arrival(case: Case, tokens: int, device: str = "cpu") -> Any:
    """Return the gradient that arrives at the loss."""
    values = torch.randn(2 * tokens + 2, generator=torch.Generator().manual_seed(1)).to(device)
    if case.reduction != "none":
        return values[0]
    if case.arrives == "strided":
        return values[: 2 * tokens : 2]
    if case.arrives == "expanded":
        return values[:1].expand(tokens)
    if case.arrives == "zero first":
        values[0] = 0.0
    return values[:tokens]


def run(case: Case, place: Place) -> dict[str, Any]:
    """Return the relative errors of the loss and of each gradient, and the problems."""
    hidden, weight, labels = inputs(case, place)
    arriving = arrival(case, labels.numel(), place.device)
    hidden, weight, labels = (each.to(place.device) for each in (hidden, weight, labels))
    loss, hidden_slope, weight_slope = truth(case, hidden, weight, labels, arriving)
    mine = slice(place.rank * (weight.shape[0] // place.ranks), (place.rank + 1) * (weight.shape[0] // place.ranks))
    share = hidden.shape[0] // place.ranks
    part = slice(place.rank * share, (place.rank + 1) * share) if case.sequence_parallel else slice(None)
    ours = {
        "hidden": hidden[part].clone().requires_grad_("hidden" not in case.frozen),
        "weight": weight[mine].clone().requires_grad_("weight" not in case.frozen),
    }
    found = call(case, ours, labels, place)
    found.backward(arriving)

    problems = [f"the loss is {found.dtype}"] if found.dtype != torch.float32 else []
    if tuple(found.shape) != tuple(loss.shape):
        problems.append(f"the loss has shape {tuple(found.shape)}")
    errors = {"loss": error(found.detach(), loss)}
    expected = {"hidden": hidden_slope[part], "weight": weight_slope[mine]}
    for name, leaf in ours.items():
        if name in case.frozen:
            problems += [f"{name} is frozen and has a gradient"] if leaf.grad is not None else []
        elif leaf.grad is None or leaf.grad.dtype != leaf.dtype:
            problems.append(f"{name} has no gradient of its own dtype")
        else:
            errors[name] = error(leaf.grad, expected[name])
    return {"problems": problems, "errors": errors}


def call(case: Case, ours: dict[str, Any], labels: Any, place: Place) -> Any:
    """Call upstream's public function."""
    chosen = {FORWARD_SPLIT: str(case.split), BACKWARD_SPLIT: str(case.split)} if case.split else {}
    context: Any = contextlib.nullcontext()
    if case.autocast:
        context = torch.autocast(place.device.partition(":")[0], dtype=getattr(torch, case.autocast))
    with mock.patch.dict(os.environ, chosen), context:
        return upstream.linear_cross_entropy(
            ours["hidden"],
            ours["weight"],
            labels,
            tp_group=place.group,
            reduction=case.reduction,
            ignore_index=case.ignore_index,
            sequence_parallel=case.sequence_parallel,
        )


def error(seen: Any, true: Any) -> float:
    """Return the relative error in the Euclidean norm; the absolute one where the truth is zero."""
    size = float(true.norm())
    return float((seen.double() - true).norm()) / (size or 1.0)


def leaves(tokens: int, size: int, classes: int, device: str) -> tuple[dict[str, Any], Any]:
    """Return bf16 hidden states and weight that want gradients, and labels."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, size, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(classes, size, device=device) / size**0.5).bfloat16().requires_grad_()
    return {"hidden": hidden, "weight": weight}, torch.randint(0, classes, (tokens,), device=device)


def peak(tokens: int, size: int, classes: int, place: Place) -> float:
    """Return MiB that forward and backward take at most, in addition to inputs and gradients."""
    ours, labels = leaves(tokens, size, classes, place.device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(Case(reduction="mean"), ours, labels, place).backward()
    torch.cuda.synchronize()
    gradients = sum(each.grad.numel() * each.grad.element_size() for each in ours.values())
    return float(torch.cuda.max_memory_allocated() - before - gradients) / 2**20


def replays(case: Case, place: Place) -> bool:
    """Return whether a step replayed from a CUDA graph, with other numbers, gives the bits of a step that is not."""
    static, labels = leaves(512, 256, 4001, place.device)
    arriving = torch.rand(512, device=place.device)

    def step() -> list[Any]:
        for each in static.values():
            each.grad = None
        loss = call(case, static, labels, place)
        loss.backward(arriving if case.reduction == "none" else None)
        return [loss.detach(), *(each.grad for each in static.values())]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for each in (*static.values(), arriving):
            each.mul_(0.75)
        labels.copy_(labels.flip(0))
        labels[::7] = -100
    graph.replay()
    return same([each.clone() for each in captured], step())


def again(place: Place) -> dict[str, Any]:
    """Return whether a second call synchronises with the host, and whether it and a compiled one give the same bits."""
    ours, labels = leaves(512, 256, 4001, place.device)
    arriving = torch.rand(512, device=place.device)

    def step(function: Any) -> list[Any]:
        for each in ours.values():
            each.grad = None
        loss = function(ours["hidden"], ours["weight"], labels, reduction="none")
        loss.backward(arriving)
        return [loss.detach(), *(each.grad for each in ours.values())]

    first = step(upstream.linear_cross_entropy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second, synchronises = step(upstream.linear_cross_entropy), ""
    except RuntimeError as error:
        second, synchronises = [], str(error)
    torch.cuda.set_sync_debug_mode("default")
    compiled = step(torch.compile(upstream.linear_cross_entropy, backend="eager"))
    return {
        "synchronises": synchronises,
        "same bits": same(first, second),
        "compiled": same(first, compiled),
        "replayed": {
            f"{reduction}, {way}": replays(Case(reduction=reduction, split=split), place)
            for reduction in ("none", "mean")
            for way, split in {"in blocks": 1024, "at once": 0}.items()
        },
    }


def same(one: list[Any], other: list[Any]) -> bool:
    """Return whether two lists hold the same bits."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def join(request: dict[str, Any], place: Place) -> None:
    """Make this process one rank of the group."""
    torch.distributed.init_process_group(
        request["backend"], init_method=f"file://{request['rendezvous']}", rank=place.rank, world_size=place.ranks
    )
    place.group = torch.distributed.group.WORLD


def main() -> None:
    """Run the cases of the request."""
    request = json.loads(os.environ["PORTABLE_ENTRY"])
    place = Place(request["device"], request.get("scale", 1), request.get("rank", 0), request.get("ranks", 1))
    report: dict[str, Any] = {}
    if place.device == "cpu":
        core = SimpleNamespace(forward_func=entry.forward_on_any_device, backward_func=entry.backward_on_any_device)
        upstream._get_platform = lambda: core
    else:
        torch.cuda.set_device(place.device)
        record = next(r for r in megacpp_overlays.audit().records if r.overlay.pack == 10)
        report["decision"], report["entry"] = record.decision.value, upstream._get_platform().forward_func.__module__
    if place.ranks > 1:
        join(request, place)
    if request.get("widen"):
        linear_cross_entropy_products._NAMES_DTYPES = False
    table = PARALLEL if place.ranks > 1 else {**CASES, **LARGE}
    report["cases"] = {name: run(table[name], place) for name in request["cases"]}
    if request.get("peak"):
        report["peak"] = peak(*request["peak"], place)
    if request.get("again"):
        report["again"] = again(place)
    if place.ranks > 1:
        torch.distributed.destroy_process_group()
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
