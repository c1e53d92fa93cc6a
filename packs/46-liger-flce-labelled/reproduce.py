"""Fused linear cross entropy with a mean, as trainers call it: do tokens without a label go through its products?

A tenth of the tokens is labelled. The first step of a process may look at the labels, so a later one counts. On the CPU the
multiplications of torch are counted: upstream has three products of all tokens, the overlay three or four of those that
are labelled. On a GPU a step is timed against one with all tokens labelled. Gradients are compared with float64.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent, triton_interpreter

STEPS, TIMED = 3, 20


class Shape(NamedTuple):
    """Sizes of one problem, and the relative error (Frobenius norm) that its dtype explains."""

    tokens: int
    hidden: int
    vocabulary: int
    dtype: str
    tolerance: float


def _interpreter() -> Behaviour:
    with triton_interpreter():
        return _measure(Shape(512, 16, 32, "float32", 1e-4), "cpu")


def _gpu() -> Behaviour:
    return _measure(Shape(8192, 2048, 131072, "bfloat16", 3e-2), "cuda")


def _measure(shape: Shape, device: str) -> Behaviour:
    import torch

    loss = _loss()
    generator = torch.Generator().manual_seed(46)
    dtype = getattr(torch, shape.dtype)
    x = torch.randn(shape.tokens, shape.hidden, generator=generator).to(device, dtype)
    weight = (torch.randn(shape.vocabulary, shape.hidden, generator=generator) / shape.hidden**0.5).to(device, dtype)
    every = torch.randint(0, shape.vocabulary, (shape.tokens,), generator=generator)
    target = torch.where(torch.rand(shape.tokens, generator=generator) > 0.1, -100, every).to(device)
    labelled = int((target != -100).sum())

    def step(target: Any) -> list[Any]:
        given = [tensor.detach().clone().requires_grad_() for tensor in (x, weight)]
        loss(given[1], given[0], target).backward()
        return [tensor.grad for tensor in given]

    for _ in range(STEPS):
        found = step(target)
    errors = [_error(*pair) for pair in zip(found, _reference(x, weight, target), strict=True)]
    if device == "cpu":
        share = _multiplied(lambda: step(target), shape) / shape.tokens
        cost = f"a step multiplies as much as three products of {share * shape.tokens:.0f} tokens"
    else:
        few, all_of_them = (_milliseconds(lambda given=given: step(given)) for given in (target, every.to(device)))
        share = few / all_of_them
        cost = f"a step takes {few:.2f} ms, and {all_of_them:.2f} ms with all of them labelled"
    seen = (
        f"{labelled} of {shape.tokens} tokens are labelled; {cost}; gradients in {shape.dtype} against float64: "
        f"input {errors[0]:.1e}, weight {errors[1]:.1e}"
    )
    return Behaviour(broken=share > 0.5 or not max(errors) < shape.tolerance, seen=seen)


def _multiplied(step: Callable[[], Any], shape: Shape) -> float:
    """Return of how many tokens three products take as many multiplications as a step does."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        step()
    return float(counter.get_total_flops() / (3 * 2 * shape.hidden * shape.vocabulary))


def _milliseconds(step: Callable[[], Any]) -> float:
    """Return the median of some steps on a CUDA device."""
    import torch

    for _ in range(STEPS):
        step()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in itertools.pairwise(marks))


def _loss() -> Any:
    try:
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
    except ModuleNotFoundError as error:
        if error.name == "transformers":
            raise Blocked("this liger-kernel cannot be imported without transformers") from error
        if error.name and error.name.startswith("liger_kernel."):
            raise TargetAbsent("there is no fused linear cross entropy") from error
        raise
    return LigerFusedLinearCrossEntropyLoss()


def _reference(x: Any, weight: Any, target: Any) -> tuple[Any, Any]:
    """Return the gradients of the mean in float64: input [tokens, hidden], weight [vocabulary, hidden]."""
    import torch

    labelled = target != -100
    x64, weight64 = x.double()[labelled], weight.double()
    slope = torch.softmax(x64 @ weight64.t(), dim=-1)
    slope[torch.arange(len(slope), device=target.device), target[labelled]] -= 1
    slope /= len(slope)
    of_input = torch.zeros_like(x, dtype=torch.float64)
    of_input[labelled] = slope @ weight64
    return of_input, slope.t() @ x64


def _error(found: Any, true: Any) -> float:
    return float((found.double() - true).norm() / true.norm())


_VERSIONS = ("liger-kernel", "torch", "triton", "numpy")
CASES = (
    Case(
        name="interpreter",
        overlay="liger-flce-labelled",
        device="cpu",
        versions=_VERSIONS,
        run=_interpreter,
        environment={"TRITON_INTERPRET": "1"},
    ),
    Case(
        name="gpu",
        overlay="liger-flce-labelled",
        device="cuda",
        versions=_VERSIONS,
        run=_gpu,
        environment={"TRITON_INTERPRET": "0"},
    ),
)
