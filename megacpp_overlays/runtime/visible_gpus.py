"""A list of the GPUs that this process may use, from the CUDA driver: without torch or a CUDA context, within milliseconds."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of the CUDA driver API."""


class Gpu(NamedTuple):
    """One GPU, with the fields that a `Stamp` of a receipt has."""

    name: str
    capability: str
    """Compute capability, such as `9.0`."""
    driver: str
    """Version of the driver, or `of unknown version`."""


def visible() -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES allows; none where there is no driver, or it reports an error."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    driver = _driver_version()
    described = (_describe(cuda, number, driver) for number in range(count.value))
    return [each for each in described if each is not None]


def _describe(cuda: ctypes.CDLL, number: int, driver: str) -> Gpu | None:
    """Return a GPU, or None where the driver reports an error."""
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    major, minor = ctypes.c_int(), ctypes.c_int()
    if cuda.cuDeviceGet(ctypes.byref(device), number) != 0:
        return None
    codes = (
        cuda.cuDeviceGetName(name, len(name), device),
        cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device),
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device),
    )
    if any(codes):
        return None
    return Gpu(name.value.decode(errors="replace"), f"{major.value}.{minor.value}", driver)


def _driver_version() -> str:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "of unknown version"
    version = ctypes.create_string_buffer(96)
    known = nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(version, len(version)) == 0
    return version.value.decode(errors="replace") if known else "of unknown version"
