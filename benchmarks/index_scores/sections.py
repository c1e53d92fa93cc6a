"""The sections of the benchmark of index scores: each measures one kind of work at one size and returns plain data."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import timing
import torch
from index_scores import truth
from index_scores.work import (
    Bench,
    Contestants,
    Shape,
    autograd_contestants,
    copy_of,
    loss_inputs,
    matrix_products,
    positional,
    step_contestants,
    ways,
)

from megacpp_overlays.kernels.attention_target import function as attention_target
from megacpp_overlays.kernels.index_scores import function as index_scores
from megacpp_overlays.runtime.score_gradient import BackwardTrace

BURST_MS = 30
"""A turn on tensor cores lasts this long, so that it is spent at the power limit as a training step is."""
LARGER_THAN_L2 = 256 << 20


def forward(bench: Bench, shape: Shape) -> dict[str, Any]:
    """Scores alone: times with a warm and a cold cache, rate compared with a matrix product, memory, accuracy, top-k."""
    inputs = bench.inputs(shape)
    functions = ways(bench)
    contestants: Contestants = {name: (lambda way=way: way(*inputs),) for name, way in functions.items()}
    compiles(bench, contestants)
    products, flops = matrix_products(bench, shape)
    flops |= dict.fromkeys(contestants, shape.flops)
    # Contestants on tensor cores race apart: among the others they would rest between their turns, and be faster.
    fast = {"kernel": contestants["kernel"], **products}
    slow = {name: stages for name, stages in contestants.items() if name not in fast}
    scratch = torch.empty(1 if bench.device == "cpu" else LARGER_THAN_L2, dtype=torch.int8, device=bench.device)
    rows: dict[str, dict[str, Any]] = {name: {"matmul": name in products} for name in (*slow, *fast)}
    for cache, before_each in (("warm", None), ("cold", scratch.zero_)):
        bench.race(fast, rounds=2, burst_ms=1 if bench.quick else 200)
        times = bench.race(fast, before_each=before_each, burst_ms=1 if bench.quick else BURST_MS)
        times |= bench.race(slow, before_each=before_each)
        rates = {name: flops[name] / found["ms"] / 1e9 for name, found in times.items() if found}
        for name, row in rows.items():
            row[cache] = times[name]
            if name in rates:
                row[cache] |= {"tflops": rates[name], "of_matmul": rates[name] / max(rates[each] for each in products)}
    clocks = clocks_under(bench, products)
    del products, fast, scratch

    rows_of_truth = truth.some_rows(*inputs)
    for name, stages in contestants.items():
        rows[name]["extra_mib"] = timing.extra_mib(stages, bench.device)
        if rows[name]["warm"]:
            rows[name]["errors"] = truth.score_errors(stages[0](), *rows_of_truth)
    ours = functions["kernel"](*inputs)
    found = {"clocks": clocks, "rows": rows, "output_mib": timing.mib(ours)}
    found["same_bits_again"] = torch.equal(ours, functions["kernel"](*inputs))
    if rows["upstream"]["warm"]:
        found["top_k"] = truth.top_k_agreement(functions["upstream"](*inputs), ours, inputs, bench.topk)
    return found


def compiles(bench: Bench, contestants: Contestants) -> None:
    """Drop torch.compile where it does not work, and say why."""
    try:
        timing.fits(contestants["torch.compile"], bench.device)
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises
        bench.found["problems"].append(f"torch.compile: {type(error).__name__}: {str(error)[:500]}")
        del contestants["torch.compile"]
        timing.clear(bench.device)


def clocks_under(bench: Bench, products: Contestants) -> dict[str, str] | None:
    """Return clock, power and temperature of the GPU while products keep it busy."""
    if bench.device == "cpu":
        return None
    fields = ("clocks.sm", "clocks.max.sm", "power.draw", "temperature.gpu")
    product = next(iter(products.values()))
    for _ in range(800):
        product[0]()
    found = dict(zip(fields, timing.ask_driver(*fields), strict=True))
    timing.settle(bench.device)
    return found


def autograd(bench: Bench, shape: Shape) -> dict[str, Any]:
    """Scores and their gradients through autograd, for a random gradient."""
    found = autograd_at(bench, shape)
    smaller = shape
    while found["rows"]["upstream"]["ms"] is None and smaller.batch > 1:
        timing.clear(bench.device)
        smaller = replace(smaller, batch=smaller.batch // 2)
        found = autograd_at(bench, smaller) | {"does_not_fit": {"batch": smaller.batch * 2, "of": found}}
    return found


def autograd_at(bench: Bench, shape: Shape) -> dict[str, Any]:
    """Measure one micro-batch."""
    contestants, leaves, grad = autograd_contestants(bench, shape)
    rows = bench.rows(contestants)
    expected = truth.true_gradients(grad, *(leaf.detach() for leaf in leaves))
    for name, (scores, gradients) in contestants.items():
        if rows[name]["ms"]:
            rows[name]["errors"] = truth.gradient_errors(gradients(scores()), expected)
    return {"batch": shape.batch, "rows": rows, "gradients_mib": timing.mib(*leaves), "scores_mib": timing.mib(grad)}


def manual(bench: Bench, shape: Shape) -> dict[str, Any]:
    """Megatron's own backward of the fused indexer loss, as a whole and in its halves."""
    found = []
    for heads in bench.main_heads:
        smaller = shape
        found.append(manual_at(bench, smaller, heads))
        while found[-1]["rows"]["before"]["ms"] is None and smaller.batch > 1:
            timing.clear(bench.device)
            smaller = replace(smaller, batch=smaller.batch // 2)
            found.append(manual_at(bench, smaller, heads))
        timing.clear(bench.device)
    return {"main": found}


def manual_at(bench: Bench, shape: Shape, heads: int) -> dict[str, Any]:
    """Measure one micro-batch and one number of main heads."""
    values = loss_inputs(bench, shape, heads)
    q, weights, k = (values[name] for name in ("q", "weights", "k"))
    known = index_scores.scores(q, weights, k)
    ranked, chosen = (known + values["mask"]).topk(min(bench.topk, shape.keys), dim=-1)
    values |= {
        "topk_indices": chosen.masked_fill(ranked == -torch.inf, -1),
        "grad_loss": torch.ones((), device=q.device),
    }
    del ranked, chosen
    order = list(inspect.signature(bench.before.bwd_fused_indexer_loss_naive).parameters)
    rest = positional(order[3:], values)
    half = copy_of(bench.before)
    half._compute_index_scores = lambda *_, **__: known  # noqa: SLF001 - the scores are the other half's work

    of_target = [values[name] for name in ("query", "key", "softmax_scale")]

    def loss_half() -> Any:
        trace = BackwardTrace(q, weights, k, "the loss half cannot be measured")
        return trace.gradient(half.bwd_fused_indexer_loss_naive(*trace.proxies(), *rest))

    contestants: Contestants = {
        "loss half": (loss_half,),
        "target": (
            lambda: attention_target.target(*of_target, mask=values["mask"], topk_indices=values["topk_indices"]),
        ),
        "before": (lambda: bench.before.bwd_fused_indexer_loss_naive(q, weights, k, *rest),),
        "after": (lambda: bench.after.bwd_fused_indexer_loss_naive(q, weights, k, *rest),),
        "kernel half": (
            lambda: index_scores.scores(q, weights, k),
            lambda grad: index_scores.gradients(grad, q, weights, k),
        ),
    }
    found = {
        "batch": shape.batch, "heads": heads, "rows": bench.rows(contestants),
        "gradients_mib": timing.mib(q, weights, k), "scores_mib": timing.mib(known),
    }  # fmt: skip
    if found["rows"]["before"]["ms"]:
        both = zip(contestants["after"][0](), contestants["before"][0](), strict=True)
        found["apart"] = [timing.relative_error(ours, theirs.double()) for ours, theirs in both]
    return found


def step(bench: Bench, shape: Shape) -> dict[str, Any]:
    """Scores, top-k and loss, then their backward: all that the indexer does in a step of training."""
    return {"batch": shape.batch, "heads": bench.main_heads[-1], "rows": bench.rows(step_contestants(bench, shape))}


def largest(bench: Bench, shape: Shape) -> dict[str, Any]:
    """Return the largest micro-batch that each of three works fits with, and the time of a step at the largest shared."""

    def alone(shape: Shape) -> Contestants:
        inputs, functions = bench.inputs(shape), ways(bench)
        names = {"before": "upstream", "after": "kernel"}
        return {side: (lambda way=functions[name]: way(*inputs),) for side, name in names.items()}

    def differentiated(shape: Shape) -> Contestants:
        contestants = autograd_contestants(bench, shape)[0]
        return {"before": contestants["upstream"], "after": contestants["kernel"]}

    works = {"scores": alone, "autograd": differentiated, "step": lambda shape: step_contestants(bench, shape)}
    rows = {
        work: {side: search(bench, shape, build, side) for side in ("before", "after")} for work, build in works.items()
    }
    found: dict[str, Any] = {"rows": rows, "heads": bench.main_heads[-1]}
    if None not in rows["step"].values() and (batch := min(each["batch"] for each in rows["step"].values())):
        timed = {}
        for side in rows["step"]:  # one after the other: together they would not fit
            timing.clear(bench.device)
            contestants = step_contestants(bench, replace(shape, batch=batch))
            timed |= bench.rows({side: contestants[side]}, rounds=min(5, bench.rounds))
            del contestants
        found["step"] = {"batch": batch, "rows": timed}
    return found


def search(bench: Bench, shape: Shape, build: Callable[[Shape], Contestants], side: str) -> dict[str, Any] | None:
    """Return the largest micro-batch that fits, and the smallest seen that does not; None where there is no contestant."""
    if side not in build(replace(shape, batch=1)):
        return None
    works, fails, tried = 0, None, shape.batch
    started = time.perf_counter()
    while time.perf_counter() - started < bench.limit_s:
        smaller = replace(shape, batch=tried)
        if timing.fits(
            (lambda s=smaller: build(s)[side], lambda stages: timing.marked(stages, bench.device)), bench.device
        ):
            works = tried
        else:
            fails = tried
        timing.clear(bench.device)
        tried = min(2 * tried, bench.largest_batch) if fails is None else (works + fails) // 2
        if tried == works:
            break
    return {"batch": works, "fails": fails}
