"""Does `import megatron.core` talk to a CUDA device, before the launcher has chosen one?

`core/ssm/ops/gdp/common.py` keeps the name and the compute capability of a device in constants of the module, and since
`import megatron.core` reaches that file, importing the package initialises CUDA. From then on the choice of visible
devices is final, and a forked process cannot use CUDA.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent

MODULE = "megatron.core.ssm.ops.gdp.common"


def _on_cpu() -> Behaviour:
    """Import with a torch that says it has a device, and see whether anything asks for that device."""
    import torch

    asked: list[str] = []

    def answer(name: str, value: Any) -> Any:
        def instead(*_: Any, **__: Any) -> Any:
            asked.append(f"torch.cuda.{name} from {_importer()}")
            return value

        return instead

    torch.cuda.is_available = lambda: True
    # What CUDA would have to be initialised for; the answers are those of an H200.
    torch.cuda.get_device_name = answer("get_device_name", "NVIDIA H200")
    torch.cuda.get_device_capability = answer("get_device_capability", (9, 0))
    torch.cuda.get_device_properties = answer("get_device_properties", _Properties())
    torch.cuda.current_device = answer("current_device", 0)
    torch.cuda._lazy_init = answer("_lazy_init", None)
    for name in ("megatron.core", MODULE):
        _import(name)
        if asked:
            places = "; ".join(dict.fromkeys(asked))
            return Behaviour(broken=True, seen=f"importing {name} asked a device {len(asked)} times: {places}")
    return Behaviour(broken=False, seen=f"importing megatron.core and {MODULE} asked nothing of a device")


def _import(name: str) -> None:
    """Import a module of Megatron.

    Raises:
        TargetAbsent: this Megatron has no such module, and importing the package asked nothing.
    """
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not MODULE.startswith(error.name or "?"):
            raise
        raise TargetAbsent(f"importing megatron.core asked nothing of a device, and there is no {error.name}") from error


class _Properties:
    name, major, minor, multi_processor_count, total_memory = "NVIDIA H200", 9, 0, 132, 140 << 30
    shared_memory_per_block_optin = 227 << 10


def _importer() -> str:
    """Return the file of Megatron that is being executed, as its path below the package."""
    frame = sys._getframe(2)
    while frame is not None:
        parts = frame.f_code.co_filename.replace("\\", "/").split("/")
        if "megatron" in parts:
            return f"{'/'.join(parts[len(parts) - 1 - parts[::-1].index('megatron') :])}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def _on_gpu() -> Behaviour:
    """Import, see whether CUDA is initialised, and whether a forked process can still use it."""
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA was initialised before megatron.core was imported")
    for name in ("megatron.core", MODULE):
        _import(name)
        if torch.cuda.is_initialized():
            can = "can" if _forked_process_can_use_cuda() else "cannot"
            seen = f"importing {name} initialised CUDA, and a process forked afterwards {can} use it"
            return Behaviour(broken=True, seen=seen)
    return Behaviour(broken=False, seen=f"importing megatron.core and {MODULE} left CUDA uninitialised")


def _forked_process_can_use_cuda() -> bool:
    import torch

    child = os.fork()
    if child == 0:
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


_GATE = "megatron-cuda-on-import"
_VERSIONS = ("megatron-core", "torch", "triton")
CASES = (
    Case(name="import-cpu", overlay=_GATE, device="cpu", versions=_VERSIONS, run=_on_cpu),
    Case(name="import-gpu", overlay=_GATE, device="cuda", versions=_VERSIONS, run=_on_gpu),
)
