"""Gradients computed without autograd's engine: they equal the engine's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacpp_overlays.runtime.gradients import gradients

torch = pytest.importorskip("torch")

STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda x, w: x.tanh() @ w,
    "spread": lambda x, w: x * w[0] + w[:, :1].sum(),
    "parts": lambda x, _: torch.cat([each.tanh() for each in x.unbind(1)[::2]]).sum() + x,
    "first of two": lambda x, _: x.split([1, 2], 1)[0] + x,
    "written to": lambda x, w: (x * 1).index_fill_(0, torch.tensor([1]), 0.5) * w[1],
    "softmax": lambda x, _: x.softmax(-1) * x.tanh(),
    "half precision": lambda x, _: (x.tanh().bfloat16() * 2).float(),
    "cut off": lambda x, w: x + w.detach().sum(),
    "of a class": lambda x, w: TwoResults.apply(x, w.sum())[0],
}


class TwoResults(torch.autograd.Function):
    """Two results, of which one is used."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(w)
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, *arrived: Any) -> Any:
        (w,) = ctx.saved_tensors
        return arrived[0] * w, None


@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5), st.integers(0, 2**16))
def test_they_are_those_of_autograd(steps: list[str], seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    x, w, other = (torch.randn(3, 3, generator=numbers).requires_grad_() for _ in range(3))
    value = x
    for step in steps:
        value = STEPS[step](value, w) + x
    result = value.sum()

    found = gradients(result, x, w, other)

    assert (x.grad, w.grad) == (None, None)
    expected = torch.autograd.grad(result, [x, w, other], allow_unused=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
