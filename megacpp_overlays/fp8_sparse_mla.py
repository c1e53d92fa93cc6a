"""Registration of a SparseMLA kernel that takes quantized query and key tensors.

Upstream has no such kernel. With the overlay `fp8-quantized-unwrap` active, a registered kernel is called first whenever
the query or the key of an absorbed sparse attention is quantized:

    from megacpp_overlays import fp8_sparse_mla

    forget = fp8_sparse_mla.register(my_kernel)

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megacpp_overlays.errors import RegistryError

Kernel = Callable[..., Any]
"""Called with exactly the arguments of upstream's dispatcher; quantized tensors are not dequantized:

    query         [sq, b, heads, d]   (quantized or not; at least one of query and key is)
    key           [skv, b, 1, d]
    topk_indices  [b, sq, topk], integers, -1 for none
    softmax_scale float
    v_channels    int

It returns the output, plain [sq, b, heads, v_channels] with gradients for query and key, or None to decline: then the
quantized tensors are dequantized once and upstream's kernel runs. It is called every time, also under CUDA graph
capture and inside a checkpointed forward pass. Its exceptions reach the caller.
"""

_registered: Kernel | None = None


def register(kernel: Kernel) -> Callable[[], None]:
    """Register the kernel that is called first; return a function that removes it again.

    Raises:
        RegistryError: the kernel is not callable, or another one is registered.
    """
    global _registered
    if not callable(kernel):
        raise RegistryError(f"an FP8 SparseMLA kernel must be callable, not {kernel!r}")
    if _registered is not None and _registered is not kernel:
        raise RegistryError(f"{name_of(_registered)} is registered already; forget it before {name_of(kernel)}")
    _registered = kernel

    def forget() -> None:
        global _registered
        if _registered is kernel:
            _registered = None

    return forget


def registered() -> Kernel | None:
    """Return the registered kernel, or None."""
    return _registered


def name_of(kernel: Kernel) -> str:
    """Return the name of a kernel, for messages."""
    return f"{getattr(kernel, '__module__', None)}.{getattr(kernel, '__qualname__', type(kernel).__qualname__)}"
