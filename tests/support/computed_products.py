"""Record the matrix products that a step computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Products(TorchDispatchMode):
    """Lists the shapes of every product that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if "mm" in str(function):
            self.shapes.append(tuple(result.shape))
        return result


def products(step: Callable[[], object]) -> list[tuple[int, ...]]:
    """Return the shapes of the products of a step, in their order."""
    with Products() as counted:
        step()
    return counted.shapes
