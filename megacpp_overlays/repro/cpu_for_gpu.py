"""Let Megatron and Megatron-FSDP do on a CPU what they would do on a GPU, for cases of a CPU."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from typing import Any

_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp"


@contextlib.contextmanager
def cpu_for_gpu() -> Iterator[None]:
    """Create tensors on the CPU where a GPU is asked for, and let tensors report a CUDA type.

    From then on `fork` of Megatron's tracker of random streams of a GPU has no effect in this process.
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
            return found.replace("torch.", "torch.cuda.") if function is torch.Tensor.type else found

    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    with OnCpu():
        yield


def fsdp_on_cpu() -> None:
    """Let Megatron-FSDP take the CPU for the GPU of this process, which is a fork: streams do nothing, and tensors are where they are."""
    import torch

    class Nothing:
        """A stream or an event: all that is asked of it is done already."""

        def __getattr__(self, _name: str) -> Any:
            return lambda *_, **__: Nothing()

    class TorchOnCpu:
        """torch with one device."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def device(self, *_: Any) -> Any:
            return torch.device("cpu")

    for name in ("Stream", "Event", "current_stream", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *_, **__: Nothing())
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.current_device = lambda: 0
    torch.Tensor.cuda = lambda self, *_, **__: self
    vars(importlib.import_module(_FSDP))["torch"] = TorchOnCpu()
    gc.freeze()  # Megatron-FSDP collects garbage often, which would go through all that the fork has inherited
