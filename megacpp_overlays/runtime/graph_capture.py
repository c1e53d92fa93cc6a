"""CUDA graph capture: whether a stream is being captured, and which operators need a value on the host.

While a stream is captured, work is recorded and not run, so the host cannot read a value. A gate that needs this
calls `capturing` first and leaves every other run to upstream.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

_rehearsal = threading.local()
"""One answer for each thread: a forward pass in another thread has no part in a rehearsal."""

READS = frozenset({"_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero"})
"""Operators whose result, or its size, has to be on the host before the next line runs."""


def capturing(device: Any) -> bool:
    """Return whether work on a device is recorded into a CUDA graph now. Never initialises CUDA.

    False while torch.compile traces the caller. The check cannot be traced (torch 2.11), so the compiled code keeps upstream's
    path, and is one graph.

    Args:
        device: a `torch.device`. Only CUDA devices are checked, on their current stream.
    """
    import torch

    if torch.compiler.is_compiling():
        return False
    if device.type != "cuda":
        return _rehearsing()
    return _rehearsing() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Let `capturing` say yes on any device, in this thread: how a new gate is tried without a GPU."""
    before, _rehearsal.on = _rehearsing(), True
    try:
        yield
    finally:
        _rehearsal.on = before


def _rehearsing() -> bool:
    return getattr(_rehearsal, "on", False)


@contextlib.contextmanager
def host_reads() -> Iterator[list[str]]:
    """Collect the operators in this block that make the host wait for a value. Works on CPU tensors as well."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class HostReads(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (name := func.overloadpacket.__name__) in READS:
                seen.append(name)
            return func(*args, **(kwargs or {}))

    with HostReads():
        yield seen
