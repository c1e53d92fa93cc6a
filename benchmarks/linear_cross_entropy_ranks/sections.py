"""The sections of the benchmark of vocabulary-parallel linear cross entropy, as every rank runs them.

All ranks do the same calls in the same order, or they would wait for each other for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import timing
import torch
import torch.distributed as dist
from linear_cross_entropy.truth import error, truth
from linear_cross_entropy_ranks.work import ALONE, IGNORED, PARALLEL, Place, Problem, Way

# --- is it right -----------------------------------------------------------------------------------------------


def digest(tensor: torch.Tensor) -> str:
    """Return a fingerprint of the bits."""
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).cpu().numpy()).hexdigest()


def same_bits(found: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    """Return whether all are equal bit for bit."""
    return all(torch.equal(one, two) for one, two in zip(found, other, strict=True))


def correctness(place: Place, problem: Problem) -> list[dict[str, Any]]:
    """Return errors against float64 and against one GPU, the worst of all ranks, and whether bits repeat."""
    true = truth(problem.hidden, problem.weight, problem.target, problem.scale, ignore_index=IGNORED)
    rows = []
    for alone in ALONE:
        single = alone.run(problem, place)
        for way in (alone, *(way for way in PARALLEL if way.method == alone.method)):
            found = way.run(problem, place)
            expected, of_one = (way.part(whole, place) if way.parallel else whole for whole in (true, single))
            again = way.run(problem, place)
            rows.append(
                {
                    "name": way.said(place),
                    "float64": place.worst(errors(found, expected)),
                    "one_gpu": place.worst(errors(found, of_one)) if way.parallel else None,
                    "same_loss_everywhere": len(set(place.gather(digest(found[0])))) == 1,
                    "same_bits_again": all(place.gather(same_bits(found, again))),
                }
            )
    return rows


def errors(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Return the errors of losses and gradients."""
    names = ("loss", "dX", "dW", "db")[: len(found)]
    return {name: error(one, other) for name, one, other in zip(names, found, expected, strict=True)}


def options(place: Place, problem: Problem) -> list[dict[str, Any]]:
    """Return errors against one GPU where every option of the loss is in use, and the loss is a mean."""
    classes = problem.weight.shape[0]
    draw = torch.Generator(place.device).manual_seed(1)
    bias = torch.randn(classes, generator=draw, device=place.device, dtype=problem.weight.dtype)
    of_classes = torch.rand(classes, generator=draw, device=place.device) + 0.5
    chosen = {"class_weight": of_classes, "label_smoothing": 0.1, "softcap": 20.0, "lse_square_scale": 1e-4}

    def run(way: Way) -> tuple[torch.Tensor, ...]:
        own = (place.share(bias) if way.parallel else bias).detach().requires_grad_()
        leaves = [*way.leaves(problem, place), own]
        loss = way.loss(place, *leaves[:2], problem.target, bias=own, reduction="mean", **chosen)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    rows = []
    for alone in ALONE:
        single = run(alone)
        for way in (way for way in PARALLEL if way.method == alone.method):
            apart = place.worst(errors(run(way), way.part(single, place)))
            rows.append({"name": way.said(place), "one_gpu": apart})
    return rows


# --- cost -----------------------------------------------------------------------------------------------------


def times(place: Place, problem: Problem, rounds: int) -> list[dict[str, Any]]:
    """Return time and memory of each way and of the products that it cannot avoid, the slowest rank of each.

    A shard by itself is the work of a rank without the others: the difference is the cost of collectives.
    """
    contestants = {way.said(place): way.stages(problem, place) for way in (*ALONE, *PARALLEL)}
    shard = replace(
        problem, weight=place.share(problem.weight), target=problem.target % (len(problem.weight) // place.size)
    )
    contestants |= {f"one shard by itself, {way.method}": way.stages(shard, place) for way in ALONE}
    contestants |= {f"products, TP={size}": products(problem, size) for size in (1, place.size)}
    rows = raced(place, contestants, rounds)
    for way in (*ALONE, *PARALLEL):
        stages = contestants[way.said(place)]
        peak = timing.extra_mib(stages, place.device.type)
        if peak is not None:
            results = timing.mib(*way.run(problem, place))
            rows[way.said(place)] |= place.worst({"extra_mib": peak - results})
    return [{"name": name, **row} for name, row in rows.items()]


def products(problem: Problem, size: int) -> timing.Stages:
    """Return the three products over one shard, as cuBLAS does them: logits, and the gradients of hidden and weight."""
    hidden, weight = problem.hidden, problem.weight.chunk(size)[0]
    logits = torch.empty(hidden.shape[0], weight.shape[0], device=hidden.device, dtype=hidden.dtype)
    of_hidden, of_weight = torch.empty_like(hidden), torch.empty_like(weight)
    gradient = torch.randn_like(logits)
    return (
        lambda: torch.mm(hidden, weight.t(), out=logits),
        lambda _: torch.mm(gradient, weight, out=of_hidden),
        lambda _: torch.mm(gradient.t(), hidden, out=of_weight),
    )


def collectives(place: Place, problem: Problem, rounds: int) -> list[dict[str, Any]]:
    """Return the time of each collective that the work may need, by itself, and the MiB of its larger side."""
    wide = torch.randn(problem.hidden.shape, device=place.device)
    narrow, own = problem.hidden.clone(), place.share(problem.hidden).clone()
    part, statistics = torch.empty_like(place.share(wide)), torch.zeros(2, wide.shape[0], device=place.device)
    group = place.group
    sizes = {
        "all_reduce of dX, float32": wide,
        "reduce_scatter of dX, float32": wide,
        f"all_gather of hidden, {str(narrow.dtype).removeprefix('torch.')}": narrow,
        "all_reduce of two numbers a token, float32": statistics,
    }
    actions: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(wide, group=group),
        lambda: dist.reduce_scatter_tensor(part, wide, group=group),
        lambda: dist.all_gather_into_tensor(narrow, own, group=group),
        lambda: dist.all_reduce(statistics, group=group),
    ]
    rows = raced(place, {name: (action,) for name, action in zip(sizes, actions, strict=True)}, 3 * rounds)
    return [{"name": name, "mib": timing.mib(sizes[name]), **row} for name, row in rows.items()]


def raced(place: Place, contestants: dict[str, timing.Stages], rounds: int) -> dict[str, dict[str, Any]]:
    """Return the medians of the slowest rank. All ranks do the same calls, each beginning when the last is there."""
    own = timing.race(contestants, place.device.type, rounds=rounds, before_each=place.line_up)
    if missing := [name for name, row in own.items() if row is None]:
        raise MemoryError(f"rank {place.rank} has not the memory for {', '.join(missing)}")
    each = place.gather(own)
    return {name: max((rank[name] for rank in each), key=lambda row: row["ms"]) for name in contestants}


# --- CUDA graphs -----------------------------------------------------------------------------------------------


def graphs(place: Place, problem: Problem, other: Problem, rounds: int) -> list[dict[str, Any]]:
    """Capture forward and backward, collectives included; replay on other inputs; compare with a run outside."""
    rows = []
    for way in PARALLEL:
        inputs = Problem(*(each.clone() for each in vars(problem).values()))
        with captured(lambda way=way, inputs=inputs: way.run(inputs, place), place) as (replay, results):
            with torch.no_grad():
                for own, new in zip(vars(inputs).values(), vars(other).values(), strict=True):
                    own.copy_(new)
            replay()
            expected = way.run(inputs, place)
            same = same_bits(results, expected)
            apart = place.worst(errors(results, expected))
            contestants = {"eager": (lambda way=way, inputs=inputs: way.run(inputs, place),), "replayed": (replay,)}
            raced_rows = raced(place, contestants, rounds)
        taken = {name: row["ms"] for name, row in raced_rows.items()}
        rows.append({"name": way.said(place), "same_bits": all(place.gather(same)), "apart": apart, **taken})
        timing.clear(place.device.type)
    return rows


@contextmanager
def captured(
    work: Callable[[], tuple[torch.Tensor, ...]], place: Place
) -> Iterator[tuple[Callable[[], Any], tuple[torch.Tensor, ...]]]:
    """Capture the work; yield the function that replays it, and its results. On a CPU the work is run instead."""
    if place.device.type == "cpu":
        results = work()

        def replay() -> None:
            for own, new in zip(results, work(), strict=True):
                own.copy_(new)

        yield replay, results
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    place.gather(None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for its events from a thread of its own, which a stricter mode takes for a mistake.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = work()
    try:
        yield graph.replay, results
    finally:
        torch.cuda.synchronize()
        graph.reset()  # a communicator that a graph still holds cannot be closed
