"""GPUs and Triton versions on which the kernels that are not plain PyTorch were measured; all others are declined.

An overlay that saves memory may be slower than upstream's function where its kernels do not run. There it serves a call only
if upstream's largest tensor is larger than SMALL, see `serves`; a smaller call goes to upstream's function, unless
MEGACPP_OVERLAYS_SMALL_CALLS says `overlay`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Iterator

import torch

from megacpp_overlays.runtime import dynamo
from megacpp_overlays.variables import SMALL_CALLS, chosen

logger = logging.getLogger("megacpp_overlays")

CAPABILITY = 9
"""The major one."""
TRITON = (3, 6)
"""Triton's interpreter runs every branch with later ones, too; on a GPU nothing of it was run with another."""

SMALL = 1 << 28
"""Bytes of the largest tensor that upstream builds for a call, of which it holds several at a time. Up to here memory is no
reason to leave upstream's function."""

_calls_of_every_size = 0
"""How many blocks of code want calls of every size served."""

_said: set[tuple[str, str]] = set()
"""Who declined, and why: the warnings that are in the log already."""


def why_not(device: torch.device) -> str | None:
    """Return why nothing was measured on a device with the Triton that is here; None for the CPU and where it was.

    Args:
        device: of the tensors.
    """
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device} is no NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if major != CAPABILITY:
        return f"nothing was measured on compute capability {major}.{minor}, but on {CAPABILITY}"
    version = _triton()
    if version is None:
        return "triton is not installed"
    if tuple(map(int, version.split(".")[:2])) != TRITON:
        return f"nothing was measured on a GPU with triton {version}, but with {'.'.join(map(str, TRITON))}"
    return None


def declines(device: torch.device, who: str, instead: str) -> bool:
    """Return whether nothing was measured on a device, and say so in the log the first time.

    Args:
        device: of the tensors.
        who: declines.
        instead: the consequence, as the end of a sentence.
    """
    reason = why_not(device)
    if reason is not None and (who, reason) not in _said:
        _said.add((who, reason))
        logger.warning("%s: %s; %s", who, reason, instead)
    return reason is not None


def serves(tensor: torch.Tensor, dtypes: Collection[torch.dtype], elements: int) -> bool:
    """Return whether an overlay that saves memory serves a call, and upstream's function does not.

    Args:
        tensor: an argument of the call, for its dtype and device.
        dtypes: which kernels take.
        elements: float32 numbers of the largest tensor that upstream builds.
    """
    if elements * 4 > SMALL or _calls_of_every_size > 0 or chosen(SMALL_CALLS) == "overlay":
        return True
    return tensor.dtype in dtypes and bool(_is_measured_gpu(tensor.device))


@contextlib.contextmanager
def serving_calls_of_every_size() -> Iterator[None]:
    """Serve small calls everywhere, too, in all threads: for checks of the results of an overlay, not of its benefit."""
    global _calls_of_every_size
    _calls_of_every_size += 1
    try:
        yield
    finally:
        _calls_of_every_size -= 1


@dynamo.constant
@functools.cache
def _is_measured_gpu(device: torch.device) -> bool:
    return device.type != "cpu" and why_not(device) is None


def _triton() -> str | None:
    try:
        import triton  # noqa: PLC0415 - where there is none, nothing of it is asked
    except ImportError:
        return None
    version: str = triton.__version__
    return version
