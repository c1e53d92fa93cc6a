"""A tensor that is computed when it is first read: scores of all keys, which a caller may only throw away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree


class DeferredScores(torch.Tensor):  # type: ignore[misc]
    """A tensor of known shape, float32, without storage; the first operation on it computes and keeps its numbers.

    Not differentiable. The result of an operation is a plain tensor, computed from the numbers; one that writes, writes to them.
    """

    _compute: Callable[[], torch.Tensor]
    _numbers: torch.Tensor | None

    def __new__(
        cls, shape: tuple[int, ...], device: torch.device, _compute: Callable[[], torch.Tensor]
    ) -> DeferredScores:
        """Return the tensor; nothing of `shape` is allocated."""
        made: DeferredScores = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=device)  # noqa: SLF001 - how subclasses without storage are made
        return made

    def __init__(self, _shape: tuple[int, ...], _device: torch.device, compute: Callable[[], torch.Tensor]) -> None:
        """Keep the function that computes the numbers.

        Args:
            compute: returns a float32 tensor of the shape, on the device; called once at most.
        """
        self._compute, self._numbers = compute, None

    def numbers(self) -> torch.Tensor:
        """Return the plain tensor; compute it the first time."""
        if self._numbers is None:
            self._numbers = self._compute()
            del self._compute  # and with it the inputs
        return self._numbers

    def __repr__(self) -> str:
        """Return a text that names the shape, without computing anything."""
        return f"DeferredScores({tuple(self.shape)}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the numbers."""
        args, kwargs = _pytree.tree_map_only(cls, cls.numbers, (args, kwargs or {}))
        return func(*args, **kwargs)
