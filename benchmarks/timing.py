"""Shared parts of benchmarks of kernels: the host, times of calls side by side, memory."""

from __future__ import annotations

import gc
import itertools
import math
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from statistics import median
from typing import Any

Stages = Sequence[Callable[..., Any]]
"""A contestant: the first stage takes nothing, each other one the result of the stage before it."""


def about(device: str, *names: str) -> dict[str, Any]:
    """Return date, host and the versions of torch and of named distributions, for the JSON of a run on this device."""
    import torch

    from megacpp_overlays.source import distributions

    host = {"machine": platform.machine(), "python": platform.python_version()}
    if device != "cpu":
        driver, limit = ask_driver("driver_version", "power.limit")
        host |= {"gpu": torch.cuda.get_device_name(), "driver": driver, "power_limit": limit}
    versions = {"torch": torch.__version__, **{name: distributions.version(name) or "not installed" for name in names}}
    return {"date": f"{datetime.now(timezone.utc):%Y-%m-%d}", "host": host, "versions": versions}


def ask_driver(*fields: str) -> list[str]:
    """Return fields of the first GPU as nvidia-smi names and prints them.

    Raises:
        OSError: there is no nvidia-smi.
        subprocess.CalledProcessError: it does not know a field.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [field.strip() for field in printed.splitlines()[0].split(",")]


def relative_error(found: Any, expected: Any) -> float:
    """Return the largest difference over the largest value."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


def marked(stages: Stages, device: str = "cuda") -> list[Any]:
    """Run the stages; return the marks around them, to be read by `elapsed_ms` after the device is done."""
    marks, result = [_mark(device)], ()
    for stage in stages:
        result = (stage(*result),)
        marks.append(_mark(device))
    return marks


def elapsed_ms(marks: Sequence[Any]) -> list[float]:
    """Return the milliseconds of each stage."""
    return [
        (end - start) * 1000 if isinstance(end, float) else start.elapsed_time(end)
        for start, end in itertools.pairwise(marks)
    ]


def _mark(device: str) -> Any:
    if device == "cpu":
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def settle(device: str) -> None:
    """Wait for the device."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def clear(device: str) -> None:
    """Free unused memory, on the device too."""
    import torch

    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def fits(stages: Stages, device: str) -> bool:
    """Run the stages once; return whether the device has the memory for them."""
    import torch

    try:
        marked(stages, device)
        settle(device)
    except torch.OutOfMemoryError:
        fitted = False
    else:
        fitted = True
    if not fitted:  # here, not above: there the exception still holds the frames and their tensors
        clear(device)
    return fitted


def race(
    contestants: Mapping[str, Stages],
    device: str,
    *,
    rounds: int,
    burst_ms: float = 0.0,
    before_each: Callable[[], Any] | None = None,
    limit_s: float = math.inf,
) -> dict[str, dict[str, Any] | None]:
    """Time contestants in turn, so that all of them see the same clocks, power and temperature.

    Every other round takes them in reverse, so that each comes after two others. The device has something to do while the
    host hands over the first one of a round, whose time would hold that of the host otherwise.

    Args:
        contestants: stages by name.
        device: cuda or cpu.
        rounds: how often each has its turn.
        burst_ms: how long a turn lasts at least. Its first call is not counted when there are others: it finds the
            cache as another contestant left it.
        before_each: runs before every call, out of the time that is taken; its work is on the device's queue.
        limit_s: after this many seconds no round is begun; three are run always.

    Returns:
        By name: the medians `ms`, of all stages together, and `stages`, of each, with the number of `calls`; or None
        for one that does not fit into the device's memory.
    """
    prepare = before_each or (lambda: None)
    calls = {}
    for name, stages in contestants.items():
        if not fits(stages, device):
            continue
        marks = marked(stages, device)
        settle(device)
        once = sum(elapsed_ms(marks))
        calls[name] = max(1, min(200, math.ceil(burst_ms / once)))
    taken: dict[str, list[list[float]]] = {name: [] for name in calls}
    start = time.perf_counter()
    for turn in range(rounds):
        if turn >= 3 and time.perf_counter() - start > limit_s:
            break
        burst: dict[str, list[list[Any]]] = {name: [] for name in calls}
        occupy(device)
        for name, count in list(calls.items())[:: -1 if turn % 2 else 1]:
            for _ in range(count + (count > 1)):
                prepare()
                burst[name].append(marked(contestants[name], device))
        settle(device)
        for name, found in burst.items():
            taken[name] += [elapsed_ms(marks) for marks in found[len(found) > 1 :]]
    return {name: _medians(taken[name]) if name in taken else None for name in contestants}


_HEAD_START_CYCLES = 10_000_000
"""Of a clock below 2 GHz: more than 5 ms, and no call hands over its work in more than 2 here."""


def occupy(device: str) -> None:
    """Keep the device busy for some milliseconds, so that work enqueued meanwhile begins without a gap."""
    import torch

    if device != "cpu":
        torch.cuda._sleep(_HEAD_START_CYCLES)  # noqa: SLF001 - PyTorch's own tests use it; all else takes memory or power


def _medians(samples: list[list[float]]) -> dict[str, Any]:
    return {
        "ms": median(sum(sample) for sample in samples),
        "stages": [median(stage) for stage in zip(*samples, strict=True)],
        "calls": len(samples),
    }


def host_ms(stages: Stages, device: str) -> float:
    """Return the milliseconds after which the host has handed all stages over to a device with nothing else to do.

    Where they are more than the stages take on the device, it is the host that is measured there.
    """
    taken = []
    for _ in range(3):
        settle(device)
        start = time.perf_counter()
        result: tuple[Any, ...] = ()
        for stage in stages:
            result = (stage(*result),)
        taken.append((time.perf_counter() - start) * 1000)
    settle(device)
    return median(taken)


def extra_mib(stages: Stages, device: str) -> float | None:
    """Return the peak of device memory above the memory held before, in MiB; None on a CPU, or where it does not fit."""
    import torch

    if device == "cpu" or not fits(stages, device):  # the first run fills workspaces that stay
        return None
    clear(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    marked(stages, device)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def mib(*tensors: Any) -> float:
    """Return the size of tensors, in MiB."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20
