"""Context in which Megatron runs its GPU code path on a CPU, for cases of a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def cpu_for_gpu() -> Iterator[None]:
    """Create tensors on the CPU where a GPU is requested, and let tensors report a CUDA type.

    From then on `fork` of Megatron's CUDA RNG tracker has no effect in this process.
    """
    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):  # type: ignore[misc] # torch is not seen by the type checker
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = dict(kwargs or {})
            if str(given.get("device")).startswith("cuda"):
                given["device"] = "cpu"
            found = function(*args, **given)
            is_name = function is torch.Tensor.type and isinstance(found, str)  # with an argument it converts
            return found.replace("torch.", "torch.cuda.") if is_name else found

    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    with OnCpu():
        yield
