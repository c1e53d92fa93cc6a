"""A table whose slices scale and shift several norms, compiled by Inductor: does it get its gradient?

Compared are gradients of real `torch.compile` with those of the same function in float64, for each slice of the table. Reductions are large enough for a kernel of two orders, which a GPU alone has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megacpp_overlays.repro import Behaviour, Case

OVERLAY = "mix-order-reduction-views"
MODULE = "torch._inductor.scheduler"
SHAPES = ((2, 8192, 1536), (8, 4096, 2048))
TOLERANCE = 1e-3


def _run() -> Behaviour:
    said, broken = [], False
    for shape in SHAPES:
        off = apart(_two_norms, *inputs(shape, slices=4))
        broken |= not max(off) < TOLERANCE  # and not where one is no number
        said.append(f"{shape}: rows {off[0]:.1e}, table {off[1]:.1e}")
    return Behaviour(broken=broken, seen=f"gradients are off by: {'; '.join(said)}")


def _two_norms(rows: Any, table: Any, weight: Any) -> Any:
    """Two norms, each scaled and shifted by slices of one table, as adaptive layer norms do."""
    scale, shift, other_scale, other_shift = table.chunk(4, dim=1)
    hidden = _norm(rows) * (1 + scale) + shift
    return _norm(hidden @ weight + rows) * (1 + other_scale) + other_shift


def _norm(rows: Any) -> Any:
    import torch

    return torch.nn.functional.layer_norm(rows, rows.shape[-1:])


def inputs(shape: Sequence[int], *, slices: int) -> tuple[Any, ...]:
    """Return rows, a table of slices, a square weight and a gradient of the output."""
    import torch

    made = torch.Generator().manual_seed(62)
    width = shape[-1]
    rows, gradient = (torch.randn(*shape, generator=made) for _ in range(2))
    table, weight = torch.randn(1, slices, width, generator=made) / 10, torch.randn(width, width, generator=made) / width**0.5
    return tuple(each.cuda() for each in (rows, table, weight, gradient))


def apart(function: Callable[..., Any], *given: Any) -> list[float]:
    """Return how far gradients of compiled code are off for each input, relative to those in float64."""
    import torch

    with compiling():
        found = gradients(torch.compile(function), *given)
    right = gradients(function, *(each.double() for each in given))
    return [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, right, strict=True)]


def gradients(function: Callable[..., Any], *given: Any) -> Any:
    """Return the gradients of all inputs but the last, which is the one of the output."""
    import torch

    *learned, gradient = (each.detach().clone().requires_grad_() for each in given)
    return torch.autograd.grad(function(*learned), learned, gradient.detach())


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile anew, whatever this process compiled before."""
    from torch._dynamo import reset

    reset()
    yield
    reset()


CASES = (Case(name="table-gpu", overlay=OVERLAY, device="cuda", versions=("torch", "triton"), run=_run),)
