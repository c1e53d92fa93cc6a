"""`is_first_microbatch` of layers that are quantized by a recipe, set at the beginning of a step.

Transformer Engine keeps the quantized copy of a weight until `is_first_microbatch` is set on its layer. Before
0.19.0 Megatron's `set_is_first_microbatch` sets the flag for `fp8`, `fp4` and Kitchen, and not where a recipe alone quantizes: such layers
compute with the weights of the first step for ever, and later updates have no effect.

Upstream's method runs unchanged. Where there is a recipe, the flag is set on every layer that has it, as in upstream's repair. Layers
that are not quantized do not read it.

Source: https://github.com/NVIDIA/Megatron-LM/issues/5641, https://github.com/NVIDIA/Megatron-LM/pull/5642
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import quant_recipe_stale_weights as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread

_FLAG = "is_first_microbatch"


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def set_is_first_microbatch(self: Any) -> None:
        original(self)
        if getattr(self.config, "quant_recipe", None) is not None:
            for layer in self.modules():
                if hasattr(layer, _FLAG):
                    layer.is_first_microbatch = True

    return set_is_first_microbatch


def observe(module: ModuleType) -> Observation:
    """Read the flag of a layer after a call of upstream's method: with a recipe, with `fp8`, and with neither."""
    found = {}
    for quantized in ("quant_recipe", "fp8", None):
        layer = SimpleNamespace(is_first_microbatch=False)
        config = SimpleNamespace(
            **{"fp8": None, "fp4": None, "quant_recipe": None, **({quantized: "a"} if quantized else {})}
        )
        model = SimpleNamespace(config=config, modules=lambda layer=layer: iter([SimpleNamespace(), layer]))
        getattr(module, feature.CLASS).set_is_first_microbatch(model)
        found[quantized] = layer.is_first_microbatch
    return Observation(
        broken=found != {"quant_recipe": True, "fp8": True, None: False},
        seen=f"is_first_microbatch at the beginning of a step: with a recipe {found['quant_recipe']}, with fp8 {found['fp8']}, "
        f"with neither {found[None]}",
    )


OVERLAY = Overlay(
    id="quant-recipe-stale-weights",
    pack=36,
    title="mark the first microbatch of a step for layers that a quantization recipe selects",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.NOT_TOLD: (Replacement(symbol=feature.METHOD, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "loss stops going down with a quantization recipe",
        "quantized layers do not learn",
        "FP8 weights never change after the first step",
    ),
    concerns="quant_recipe",
    breaks="layers that a recipe alone quantizes compute with the weights of the first step for ever",
    retire_when="every supported megatron-core is 0.19.0 or newer",
    brief="stale weights of quantization recipes",
    until="megatron-core is 0.19.0",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=5641, state="closed by 5642"),
        Thread(repository="NVIDIA/Megatron-LM", number=5642, state="merged 2026-07-10, released in 0.19.0"),
    ),
    last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.16.1, 0.18.2 and 0.19.2; 0.13.0 to 0.19.2, main "
    "d98e8a64dd and dev d48bd6be0a read",
)
