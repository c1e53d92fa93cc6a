"""Run in a fresh interpreter: the answers of Megatron's dispatcher on made-up devices, as JSON.

The tree is the one that is first on the path. MEGACPP_OVERLAYS decides whether the overlay is on. With LATE=1 it is
imported after the target, and after a failed call. With KERNELS=1 the packages of upstream's kernels can be imported,
so that its entries define their functions; none of these kernels can run.
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
    """Finds every module of nvidia-cutlass-dsl and cuda-python, with whatever is asked of it."""

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
    import megacpp_overlays  # noqa: F401 - it arms
# isort: split
from megatron.core.fusions import fused_linear_cross_entropy as upstream  # noqa: E402 - LATE is about this order

OVERLAY = "hopper-flce-dispatch"


class Device:
    """The properties that torch reports of a GPU that is not there."""

    def __init__(self) -> None:
        self.major = 9
        self.asked = 0

    def capability(self, device: Any = None) -> tuple[int, int]:
        self.asked += 1
        return self.major, 0

    def pretend(self) -> None:
        torch.cuda.is_available = lambda: True
        torch.cuda.current_device = lambda: 0
        torch.cuda.get_device_capability = self.capability


def forget() -> None:
    """Bring the dispatcher back to where it was after import, as far as upstream's own means reach."""
    upstream.Platform._instance = None
    upstream._get_platform.cache_clear()


def answer(device: Device, major: int, *, fresh: bool = True) -> str:
    """Return the module of the chosen entry, or the error."""
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
    """Return the parameters of the functions of upstream's own entry, or None where it cannot import its kernels."""
    from megatron.core.fusions.linear_cross_entropy.blackwell import entry

    if not hasattr(entry, "forward"):
        return None
    return {name: list(inspect.signature(getattr(entry, name)).parameters) for name in ("forward", "backward")}


def hopper_without_kernels(device: Device) -> Any:
    """Return the answer for 9 where the imports of upstream's own entry failed, and the logged messages."""
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
    try:
        upstream.linear_cross_entropy(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64))
    except ValueError as error:
        return str(error)
    return "accepted"


def main() -> None:
    """Ask, fail, ask again, undo."""
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
