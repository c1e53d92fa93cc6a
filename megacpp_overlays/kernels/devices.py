"""Where Triton launches its programs."""

from __future__ import annotations

import contextlib

import torch


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which Triton launches on a tensor's device: it takes the current one, which may be another."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    device: contextlib.AbstractContextManager[object] = torch.cuda.device(tensor.device)
    return device
