"""The device on which Triton launches its programs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context that makes a tensor's device the current one, because Triton launches on the current device."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    device: contextlib.AbstractContextManager[object] = torch.cuda.device(tensor.device)
    return device


def launching_there(tensor: torch.Tensor, launch: Callable[[int], None]) -> Callable[[int], None]:
    """Return a function that launches on a tensor's device; it is `launch` itself where that is the current one.

    It is for launches that follow at once: there are hundreds, and to ask for the device takes as long as some of them.
    """
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return launch

    def there(number: int) -> None:
        with on_device_of(tensor):
            launch(number)

    return there
