"""Run in a fresh interpreter: print the choices of Megatron's cross entropy dispatcher on simulated devices, as JSON.

The tree is the first one on the path. MEGACPP_OVERLAYS decides whether the overlay is on. With LATE=1 the overlay is
imported after the target, and after a call of the dispatcher. With KERNELS=1 mocks replace the packages of upstream's
kernels. Upstream's entries then define their functions, but the kernels cannot run.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import inspect
import json
import logging
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch


class KernelPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder and loader of mocks for the modules of nvidia-cutlass-dsl and cuda-python.

    Each attribute is a new MagicMock, except names that begin with two underscores.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        is_one = name.partition(".")[0] in {"cuda", "cutlass"}
        return importlib.util.spec_from_loader(name, self, is_package=True) if is_one else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = self.attribute  # type: ignore[method-assign]

    def attribute(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


LATE = os.environ.get("LATE") == "1"
if os.environ.get("KERNELS") == "1":
    sys.meta_path.insert(0, KernelPackages())
if not LATE:
    import megacpp_overlays  # noqa: F401 - the import arms the overlay
# isort: split
from megatron.core.fusions import fused_linear_cross_entropy as upstream  # noqa: E402 - LATE decides the order of these imports

OVERLAY = "hopper-flce-dispatch"


class Device:
    """A simulated GPU, with the compute capability `major`.0 and a count of the queries for it."""

    def __init__(self) -> None:
        self.major = 9
        self.asked = 0

    def capability(self, device: Any = None) -> tuple[int, int]:
        self.asked += 1
        return self.major, 0

    def pretend(self) -> None:
        """Make torch report this GPU."""
        torch.cuda.is_available = lambda: True
        torch.cuda.current_device = lambda: 0
        torch.cuda.get_device_capability = self.capability


def forget() -> None:
    """Clear the dispatcher's singleton and the cache of its getter."""
    upstream.Platform._instance = None
    upstream._get_platform.cache_clear()


def answer(device: Device, major: int, *, fresh: bool = True) -> str:
    """Return the module of the entry that the dispatcher chooses, or the error as text.

    Args:
        device: the simulated GPU.
        major: its major compute capability from now on.
        fresh: whether the dispatcher is reset first.
    """
    device.major = major
    if fresh:
        forget()
    try:
        platform = upstream._get_platform()
    except (ValueError, AssertionError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    assert isinstance(platform, upstream.Platform)
    assert platform.forward_func.__module__ == platform.backward_func.__module__
    return str(platform.forward_func.__module__)


def blackwell_entry() -> dict[str, list[str]] | None:
    """Return the parameters of both functions of upstream's Blackwell entry, or None where its kernels cannot be imported."""
    from megatron.core.fusions.linear_cross_entropy.blackwell import entry

    if not hasattr(entry, "forward"):
        return None
    return {name: list(inspect.signature(getattr(entry, name)).parameters) for name in ("forward", "backward")}


def hopper_without_kernels(device: Device) -> Any:
    """Return the answer for capability 9 and the log messages, with upstream's Hopper entry as if its kernels could not be imported.

    Returns:
        None where the tree has no Hopper entry.
    """
    try:
        from megatron.core.fusions.linear_cross_entropy.hopper import entry
    except ImportError:
        return None
    for name in ("forward", "backward"):
        with contextlib.suppress(AttributeError):
            delattr(entry, name)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("megacpp_overlays").addHandler(handler)
    return {"answer": answer(device, 9), "logged": logged}


def cpu_tensors() -> str:
    """Return the error for tensors on the CPU, or `accepted`."""
    try:
        upstream.linear_cross_entropy(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64))
    except ValueError as error:
        return str(error)
    return "accepted"


def main() -> None:
    """Print the answers before and after failures, for every capability, and after the overlay is undone."""
    report: dict[str, Any] = {"cuda after import": torch.cuda.is_initialized()}
    report["without cuda"] = answer(Device(), 9)
    device = Device()
    device.pretend()
    if LATE:
        report["before"] = answer(device, 9)
        import megacpp_overlays

        report["after"] = answer(device, 9, fresh=False)
    import megacpp_overlays

    record = next(r for r in megacpp_overlays.audit().records if r.overlay.id == OVERLAY)
    report["decision"], report["shape"], report["reason"] = record.decision.value, record.shape, record.reason
    report["answers"] = {major: answer(device, major) for major in (7, 8, 9, 10, 11, 12)}
    report["blackwell entry"] = blackwell_entry()
    torch.version.hip = "6.4"
    report["amd"] = answer(device, 12)
    torch.version.hip = None
    answer(device, 7)
    report["after a failure"] = answer(device, 12, fresh=False)
    report["singleton is initialised"] = hasattr(upstream.Platform._instance, "_initialized")
    device.asked = 0
    report["on another device later"] = answer(device, 7, fresh=False)
    report["asked again"] = device.asked
    report["cpu tensors"] = cpu_tensors() if record.decision.value == "active" else None
    report["hopper without kernels"] = hopper_without_kernels(device)
    if record.decision.value == "active":
        answer(device, 12)
        megacpp_overlays.undo(OVERLAY)
        report["undone"] = answer(device, 12, fresh=False)
    report["cuda"] = torch.cuda.is_initialized()
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
