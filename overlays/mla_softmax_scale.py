"""`softmax_scale` of the configuration for Megatron's multi-latent attention: off unless its variable is `on`.

Ordinary attention honours the setting, and muP computes it. Multi-latent attention ignores it and divides by the root of its head dimension. YaRN's factor stays, as in upstream's open pull request.

Both constructors compute a scale, store it, and pass it to `build_module`, which builds their core. The seam is on that function, since other overlays have seams on the constructors. It finds the attention in the frame of
the constructor, stores the configured scale there for the paths of inference, and passes it to the core. Other modules, and cores without the setting, are built as before.

It is off by default because models with the setting were trained without its effect, and a maintainer doubts that multi-latent attention should have it.

Source: https://github.com/NVIDIA/Megatron-LM/pull/3698
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import mla_softmax_scale as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread

_CONSTRUCTORS = {(module, "__init__") for module in (feature.ATTENTION, feature.ABSORBED)}
"""Modules and functions that build a core with channels of its own."""


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def build_module(spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
        is_core = "k_channels" in kwargs and "softmax_scale" in kwargs
        if is_core and getattr(kwargs.get("config"), "softmax_scale", None) is not None:
            attention = _constructed()
            if attention is not None:
                of_yarn = kwargs["softmax_scale"] / (1 / math.sqrt(attention.q_head_dim))
                kwargs["softmax_scale"] = attention.softmax_scale = of_yarn * attention.config.softmax_scale
        return original(spec_or_module, *args, **kwargs)

    return build_module


def _constructed() -> Any:
    """Return the attention whose constructor builds its core, None where anything else is built."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - no argument leads to the attention
    # other code may have wrapped the builder
    while frame is not None and (owner := frame.f_locals.get("self")) is None:
        frame = frame.f_back
    if frame is None or (frame.f_globals.get("__name__"), frame.f_code.co_name) not in _CONSTRUCTORS:
        return None
    return owner


class _Latent:
    """Stand-in for an attention of four channels: its constructor stores a scale and builds a core, as upstream's do."""

    def __init__(self, build: Callable[..., Any], config: Any) -> None:
        self.config, self.q_head_dim, self.softmax_scale = config, 4, 0.5
        self.core = build(dict, config=config, softmax_scale=self.softmax_scale, k_channels=4)


def observe(module: ModuleType) -> Observation:
    """Build cores as constructors of both modules and another one do, with a scale of 0.125 and without."""
    found = []
    for name in (feature.ATTENTION, feature.ABSORBED, __name__):
        constructor = FunctionType(_Latent.__init__.__code__, {"__name__": name})
        for scale in (0.125, None):
            attention = object.__new__(_Latent)
            constructor(attention, module.build_module, SimpleNamespace(softmax_scale=scale))
            found.append((attention.core["softmax_scale"], attention.softmax_scale))
    (core, own), *_ = found
    return Observation(
        broken=found != [(0.125, 0.125), (0.5, 0.5)] * 2 + [(0.5, 0.5)] * 2,
        seen=f"0.125 is configured: a core gets {core}, and its attention has {own}",
    )


OVERLAY = Overlay(
    id="mla-softmax-scale",
    pack=73,
    title="scale logits of multi-latent attention by the configured softmax_scale",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.IGNORED: (Replacement(symbol=feature.TARGET.symbol, make=_make),)},
    unsupported={},
    witness=None,  # constructors of attention do not exist yet when the builder of their cores is imported
    self_test=observe,
    opt_in=True,
    symptoms=(
        "`softmax_scale` has no effect with multi-latent attention",
        "muP has no effect on attention logits of MLA",
    ),
    concerns="mla and softmax_scale",
    breaks="multi-latent attention ignores the configured softmax_scale, which muP sets, and scales logits by the root of its head dimension",
    retire_when="multi-latent attention honours softmax_scale or refuses it",
    brief="softmax_scale of MLA",
    until="MLA honours or refuses it",
    threads=(
        Thread(
            repository="NVIDIA/Megatron-LM",
            number=3698,
            state="open when last seen 2026-09-22: a repair; a maintainer doubts that MLA should have the setting",
        ),
    ),
    last_validated="2026-11-30, x86-64 without GPU, torch 2.11.0: megatron-core 0.11.0, 0.12.3, 0.16.1, 0.18.2 and 0.19.2, main d98e8a64dd and dev d48bd6be0a; 0.11.0 to 0.19.2 read",
)
