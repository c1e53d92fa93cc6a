"""A made-up upstream that torch.compile can trace, an overlay at any of its names, and the results of a step."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from made_up import BROKEN_TEXT, Upstream

from megacpp_overlays.model import Observation, Overlay, Replacement

TEXT = (
    BROKEN_TEXT
    + """
import torch


def scaled(x):
    return x * 2


class Block:
    def method(self, x):
        return x * 2

    @staticmethod
    def static(x):
        return x * 2

    @classmethod
    def of_class(cls, x):
        return x * 2


class Heir(Block):
    pass


class Module(torch.nn.Module):
    def forward(self, x):
        return x * 2


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class WithContext(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2
"""
)


def tenfold(original: Callable[..., Any], _: ModuleType) -> Callable[..., Any]:
    def replacement(*given: Any) -> Any:
        return original(*given) * 10

    return replacement


def overlay_at(upstream: Upstream, symbol: str, **changes: Any) -> Overlay:
    replacements = {"off-by-one": (Replacement(symbol=symbol, make=tenfold),)}
    works = Observation(broken=False, seen="tenfold")
    return upstream.overlay(**{"replacements": replacements, "self_test": lambda _: works, **changes})


def measured(step: Callable[[Any], Any]) -> tuple[float, float]:
    """Return the value of a step at 1, and its derivative."""
    return measured_on("cpu", step)


def measured_on(device: str, step: Callable[[Any], Any]) -> tuple[float, float]:
    """Return the same on a device."""
    x = torch.ones(2, requires_grad=True, device=device)
    y = step(x)
    y.sum().backward()
    return y[0].item(), x.grad[0].item()
