"""Portable entry of Megatron's fused linear cross entropy for GPUs that its dispatcher refuses.

The seam is `_get_platform`, the only access to the dispatcher. Upstream is called first and keeps the devices that it supports: a
Blackwell GPU always, and a Hopper GPU where the tree has an entry for it. Only a refusal of capability 8, 9 or 12 is
replaced, by the portable entry of `kernels.linear_cross_entropy.entry`. Any other refusal is unchanged, and so is
that of an AMD GPU, whose capability is also called 9. The device is queried at the first call, never at import, and
once, as upstream does.

On capability 8 and 12 and with another Triton than 3.6, which were not measured, the log has a warning, and the
entry is the plain one: cuBLAS over all tokens, between two passes that were verified in Triton's interpreter.

Upstream's singleton keeps its state after a refusal, and its cached getter does not cache a refusal. So no reset is needed
after a failed call or when the overlay is undone. `_get_platform.cache_clear()` makes the next call
query the device again.

A tree with an entry for Hopper whose kernels cannot be imported (they need nvidia-cutlass-dsl and cuda-python) ends in
an AttributeError on a Hopper GPU. There the portable entry is used, with a warning.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import hopper_flce_dispatch as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread

logger = logging.getLogger("megacpp_overlays")

_ID = "hopper-flce-dispatch"
_HOPPER = 9
_REFUSED_BY_ALL = (8, 12)
"""Major compute capabilities without a branch in every broken shape. To ask for 9 could import upstream's kernels."""
_HOPPER_ENTRY = "megatron.core.fusions.linear_cross_entropy.hopper.entry"
SERVED = frozenset({8, 9, 12})
"""Major compute capabilities that all parts of the portable entry support."""

FORWARD = ("hidden", "weight", "labels", "tp_group", "reduction", "ignore_index", "sequence_parallel")
BACKWARD = (
    "dlogprobs",
    "global_hidden",
    "weight",
    "labels",
    "maximum",
    "accu",
    "num_valid_tokens",
    "reduction",
    "ignore_index",
    "tp_group",
    "tp_rank",
    "tp_world_size",
    "sequence_parallel",
)


def _getter_that_answers(refused: frozenset[int]) -> Callable[[Callable[..., Any], ModuleType], Callable[..., Any]]:
    """Return the maker of the seam.

    Args:
        refused: major compute capabilities that the dispatcher of this shape has no branch for, of those served here.
    """

    def make(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
        served: list[Any] = []

        def _get_platform() -> Any:
            if found := served[:1]:  # another thread may clear the cache meanwhile
                return found[0]
            try:
                return original()
            except (ValueError, AttributeError) as refusal:
                major = _major_capability()
                without_kernels = isinstance(refusal, AttributeError)
                if not (_lacks_kernels(major) if without_kernels else major in refused):
                    raise
                if without_kernels:
                    logger.warning(
                        "%s has no kernels here (are nvidia-cutlass-dsl and cuda-python installed?)", _HOPPER_ENTRY
                    )
            platform = _portable_platform(module)
            served.append(platform)
            logger.info(
                "%s: compute capability %s is served by %s", module.__name__, major, platform.forward_func.__module__
            )
            _say_what_was_not_measured()
            return platform

        def cache_clear() -> None:
            served.clear()
            original.cache_clear()  # type: ignore[attr-defined]

        def cache_info() -> Any:
            return original.cache_info()  # type: ignore[attr-defined]

        # Upstream's getter is a functools cache, with these two methods.
        vars(_get_platform).update(cache_clear=cache_clear, cache_info=cache_info)
        return _get_platform

    return make


def _say_what_was_not_measured() -> None:
    """Log once that the device was not measured. It is not declined, which would keep the refusal: cuBLAS computes all tokens there."""
    import torch

    from megacpp_overlays.kernels.measured import declines

    device = torch.device("cuda", torch.cuda.current_device())
    declines(
        device, _ID, "the portable entry computes every token, with cuBLAS; compare its losses before you rely on it"
    )


def _major_capability() -> int | None:
    """Return the major compute capability of the current device, or None for a device that is not NVIDIA's."""
    import torch

    if torch.version.hip is not None:
        return None
    major: int = torch.cuda.get_device_capability(torch.cuda.current_device())[0]
    return major


def _lacks_kernels(major: int | None) -> bool:
    """Return whether upstream's own entry for this device could not import its kernels."""
    entry = sys.modules.get(_HOPPER_ENTRY)
    return major == _HOPPER and entry is not None and not hasattr(entry, "forward")


def _portable_platform(module: ModuleType) -> Any:
    """Return a platform with the portable entry, separate from upstream's singleton."""
    from megacpp_overlays.kernels.linear_cross_entropy import entry

    platform = object.__new__(module.Platform)
    platform.forward_func, platform.backward_func = entry.forward, entry.backward
    platform._initialized = True
    return platform


def _witness(module: ModuleType) -> Observation:
    """Run upstream's constructor with a made-up device.

    The function runs with other globals, so no object of other threads is changed and no device is queried.
    """
    refused = [major for major in _REFUSED_BY_ALL if _refuses(module.Platform.__init__, major)]
    seen = f"the dispatcher refuses compute capability {', '.join(map(str, refused)) or 'neither 8 nor 12'}"
    return Observation(broken=tuple(refused) == _REFUSED_BY_ALL, seen=seen)


def _refuses(constructor: FunctionType, major: int) -> bool:
    cuda = SimpleNamespace(
        is_available=lambda: True, current_device=lambda: 0, get_device_capability=lambda device=None: (major, 0)
    )
    made_up = {**constructor.__globals__, "torch": SimpleNamespace(cuda=cuda)}
    try:
        FunctionType(constructor.__code__, made_up, closure=constructor.__closure__)(SimpleNamespace())
    except ValueError:
        return True
    return False


def _self_test(module: ModuleType) -> Observation:
    """Inspect the getter that upstream's autograd function reaches and the platform that it would return; then run the platform.

    Upstream's functions run on the CPU, with the entry below them; see `rehearsal`.
    """
    from megacpp_overlays.runtime import seam_marks

    reached = getattr(module, feature.FUNCTION).forward.__globals__.get(feature.GETTER)
    if (mark := seam_marks.mark_of(reached)) is None or mark.overlay_id != _ID:
        return Observation(broken=True, seen=f"{feature.FUNCTION} does not reach the seam")
    if importlib.util.find_spec("triton") is None:
        return Observation(broken=True, seen="triton is not installed, and the portable entry needs it")
    platform = _portable_platform(module)
    for function, expected in ((platform.forward_func, FORWARD), (platform.backward_func, BACKWARD)):
        if (found := tuple(inspect.signature(function).parameters)) != expected:
            return Observation(broken=True, seen=f"the portable entry takes {', '.join(found)}")
    from megacpp_overlays.kernels.linear_cross_entropy import rehearsal

    run = rehearsal.Rehearsal(getattr(module, rehearsal.PUBLIC), feature.GETTER, feature.FUNCTION)
    if wrong := list(rehearsal.wrong(run)):
        return Observation(broken=True, seen=f"run on the CPU with the portable entry, {'; '.join(wrong)}")
    return Observation(broken=False, seen=f"compute capability 8, 9 and 12 lead to {platform.forward_func.__module__}")


def _seams(refused: frozenset[int]) -> tuple[Replacement, ...]:
    return (Replacement(symbol=feature.GETTER, make=_getter_that_answers(refused)),)


OVERLAY = Overlay(
    id=_ID,
    pack=10,
    title="The fused linear cross entropy runs on compute capability 8, 9 and 12, with a portable entry",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={
        feature.BLACKWELL_ONLY: _seams(SERVED),
        feature.BLACKWELL_AND_HOPPER: _seams(SERVED - {_HOPPER}),
    },
    unsupported={},
    witness=_witness,
    self_test=_self_test,
    opt_in=False,
    symptoms=(
        "Unsupported architecture in fused linear cross entropy",
        "cross_entropy_fusion_impl linear fails on H100, H200 or A100",
    ),
    concerns="linear_loss",
    breaks='cross_entropy_fusion_impl="linear" ends in "Unsupported architecture" at the first step on these GPUs',
    brief="the fused loss on GPUs it has no branch for",
    until="Megatron has branches for them",
    retire_when="Platform of every supported Megatron has branches for compute capability 8, 9 and 12",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=2256, state="merged to dev 2025-12-05, unreleased"),
        Thread(repository="NVIDIA/Megatron-LM", number=2206, state="open, the same for main"),
        Thread(repository="NVIDIA/Megatron-LM", number=3345, state="not merged at 2026-08-21, adds a branch for 9"),
        Thread(repository="NVIDIA/Megatron-LM", number=2739, state="merged to dev 2026-02-03, reverted by #3218"),
        Thread(repository="NVIDIA/Megatron-LM", number=3226, state="merged to dev 2026-02-04, reapplies #2739"),
    ),
    last_validated=(
        "2026-11-21, H200, torch 2.11.0+cu130, triton 3.6.0: dev d48bd6be0a and the head of pull request 3345; x86-64 "
        "without GPU: releases 0.14.0 to 0.19.2 and main read"
    ),
)
