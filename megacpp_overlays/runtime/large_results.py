"""Detect whether a function builds a tensor that it should not: reproducible inputs and a dispatch mode that records large results.

It runs on small tensors on a CPU. torch is imported when a function is called.
"""

from __future__ import annotations

import math
from typing import Any


def wave(*shape: int) -> Any:
    """Return float32 numbers between -1 and 1, always the same and none of them alike."""
    import torch

    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float32, device="cpu").mul(0.7).sin().view(shape)


def watch(bound: int, large: list[str]) -> Any:
    """Return a context that adds to `large` the name of each operator whose result has `bound` elements or more.

    It sees operators of this package from outside; their internal memory is measured by their own tests.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class LargeResults(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            results = result if isinstance(result, list | tuple) else [result]
            if any(isinstance(each, torch.Tensor) and each.numel() >= bound for each in results):
                large.append(func.overloadpacket.__name__)
            return result

    return LargeResults()
