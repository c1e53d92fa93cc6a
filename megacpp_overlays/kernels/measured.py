"""On which GPUs, and with which Triton, kernels that are not plain PyTorch were measured; what was not is declined."""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger("megacpp_overlays")

CAPABILITY = 9
"""The major one."""
TRITON = (3, 6)
"""Triton's interpreter runs every branch with later ones, too; on a GPU nothing of it was run with another."""

_said: set[tuple[str, str]] = set()
"""Who declined, and why: what the log has."""


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
        instead: what happens, as the end of a sentence.
    """
    reason = why_not(device)
    if reason is not None and (who, reason) not in _said:
        _said.add((who, reason))
        logger.warning("%s: %s; %s", who, reason, instead)
    return reason is not None


def _triton() -> str | None:
    try:
        import triton  # noqa: PLC0415 - where there is none, nothing of it is asked
    except ImportError:
        return None
    version: str = triton.__version__
    return version
