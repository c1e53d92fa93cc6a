"""Compiled models with dropout under an activation budget: do gradients belong to the mask of the forward pass?

Real layers are compiled by `torch.compile`: for a CPU without generated code (`aot_eager`), for a GPU by Inductor. The mask of a forward pass can be read off its output, which tells what
the gradient of the weights has to be.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megacpp_overlays.repro import Behaviour, Case

OVERLAY = "compile-budget-dropout"
MODULE = "torch._functorch.partitioners"
BUDGETS = (0.5, 0.05, 0.0)
TOLERANCE = 1e-3
ROWS, WIDTH = 64, 64


def _dropout(rows: Any, weight: Any) -> Any:
    import torch

    return torch.nn.functional.dropout((rows @ weight).relu(), 0.5)


def _noise(rows: Any, weight: Any) -> Any:
    import torch

    hidden = (rows @ weight).relu()
    return hidden * torch.bernoulli(torch.full_like(hidden, 0.5)) * 2


def _attention(rows: Any, weight: Any) -> Any:
    """Attention to one key, so that the output is the value or nothing."""
    import torch

    value = (rows @ weight).relu().view(ROWS, 1, WIDTH // 16, 16).transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(value, value, value, dropout_p=0.5).transpose(1, 2).reshape(ROWS, WIDTH)


FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {"dropout": _dropout, "bernoulli": _noise, "attention": _attention}


def _run(backend: str, device: str) -> Behaviour:
    off = {f"{name}, budget {budget}": _apart(function, budget, backend, device) for name, function in FUNCTIONS.items() for budget in BUDGETS}
    words = ", ".join(f"{name} {each:.1e}" for name, each in off.items())
    return Behaviour(broken=max(off.values()) > TOLERANCE, seen=f"{backend}: gradients of weights are off by: {words}")


def _apart(function: Callable[[Any, Any], Any], budget: float, backend: str, device: str) -> float:
    """Return how far the gradient of the weights is from the one of the mask that is seen, relative to the largest."""
    import torch

    rows, weight = inputs(device)
    with compiling(budget):
        output = torch.compile(function, backend=backend)(rows, weight)
        output.sum().backward()
    right = rows.detach().T @ (2.0 * (output.detach() != 0))  # what is kept is doubled
    return float((weight.grad - right).abs().max() / right.abs().max())


def inputs(device: str = "cpu") -> tuple[Any, Any]:
    """Return rows and weights, all positive, so that nothing but a mask makes an output zero."""
    import torch

    made = torch.Generator().manual_seed(61)
    rows, weight = (torch.rand(shape, generator=made) + 0.1 for shape in ((ROWS, WIDTH), (WIDTH, WIDTH)))
    return rows.to(device).requires_grad_(), weight.to(device).requires_grad_()


@contextlib.contextmanager
def compiling(budget: float) -> Iterator[None]:
    """Compile with an activation budget, whatever this process compiled before or was told to leave alone."""
    import torch
    import torch._functorch.config as settings
    from torch._dynamo import reset

    reset()
    torch.manual_seed(61)
    with torch.compiler.set_stance("default"), settings.patch(activation_memory_budget=budget, enable_autograd_cache=False):
        yield
    reset()


CASES = (
    Case(name="eager-cpu", overlay=OVERLAY, device="cpu", versions=("torch",), run=functools.partial(_run, "aot_eager", "cpu")),
    Case(name="inductor-gpu", overlay=OVERLAY, device="cuda", versions=("torch", "triton"), run=functools.partial(_run, "inductor", "cuda")),
)
