"""Float64 wherever a program asks for float32: the reference rounds nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Take float64 for float32 in every call of PyTorch, in backward passes too."""
    backward = BackwardCFunction.apply

    def apply(*given: Any) -> Any:
        with _Wide():  # the engine runs backward passes without the mode
            return backward(*given)

    torch.set_default_dtype(torch.float64)
    try:
        with _Wide(), mock.patch.object(BackwardCFunction, "apply", apply):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


class _Wide(TorchFunctionMode):  # type: ignore[misc] # torch is not followed
    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            return args[0].double()
        named = {name: _wide(each) for name, each in (kwargs or {}).items()}
        return function(*map(_wide, args), **named)


def _wide(given: Any) -> Any:
    return torch.float64 if given is torch.float32 else given
