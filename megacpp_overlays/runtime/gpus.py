"""Compute capabilities of this host's GPUs, asked of NVML: no torch, no CUDA context, safe before a fork."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

Capability = tuple[int, int]


@functools.cache  # a gate may be asked several times, and asking NVML takes tens of milliseconds
def capabilities() -> frozenset[Capability] | None:
    """Return the compute capability of every GPU of this host, visible to the process or not.

    Returns:
        None where that cannot be known: there is no driver, or it does not answer.
    """
    import ctypes  # noqa: PLC0415 - loaded only where a gate asks

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
    except (OSError, AttributeError):
        return None
    try:
        return _ask(nvml)
    except AttributeError:  # a driver from before the question existed
        return None
    finally:
        nvml.nvmlShutdown()


def elsewhere(majors: frozenset[int], *, known_alone: bool = False) -> Callable[[], str | None]:
    """Return a function that gives a gate the reason why no GPU of this host has one of some major compute capabilities.

    It returns None where a GPU has one of them.

    Args:
        majors: of the devices with the defect.
        known_alone: whether a host whose GPUs cannot be asked, such as a login node, is not concerned. Otherwise it is, and
            the gate has to say for which devices it matters.
    """

    def why() -> str | None:
        there = capabilities()
        if there is None:
            return "no GPU of this host can be asked" if known_alone else None
        if any(major in majors for major, _ in there):
            return None
        names = ", ".join(f"{major}.{minor}" for major, minor in sorted(there))
        return f"every GPU of this host has compute capability {names}"

    return why


def _ask(nvml: ctypes.CDLL) -> frozenset[Capability] | None:
    import ctypes  # noqa: PLC0415

    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return None
    found = set()
    for number in range(count.value):
        device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)) != 0:
            return None
        if nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) != 0:
            return None
        found.add((major.value, minor.value))
    return frozenset(found) or None
