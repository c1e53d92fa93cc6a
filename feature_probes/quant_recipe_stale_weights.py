"""Probe for layers that a recipe quantizes and that do not learn when a step begins.

Transformer Engine keeps a quantized copy of a weight for the microbatches of a step, and makes a new one when it is told that the first one
is computed. Megatron tells it with `set_is_first_microbatch`.

    up to 0.15.3                no recipe speaks of Transformer Engine: ABSENT
    0.16.0 to 0.18.2            told for `fp8`, `fp4` and Kitchen alone: BROKEN
    0.19.0 to 0.19.2, main, dev told for recipes, too (#5642): FIXED

Source: https://github.com/NVIDIA/Megatron-LM/issues/5641, https://github.com/NVIDIA/Megatron-LM/pull/5642
"""

from __future__ import annotations

from megacpp_overlays.feature_probes.definitions import plain_class, plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import judged, meaning, table
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.trees import SourceTree

CLASS = "MegatronModule"
METHOD = f"{CLASS}.set_is_first_microbatch"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.module", symbol=METHOD)
ENGINE = "megatron.core.extensions.transformer_engine"
NOT_TOLD = "not-told"

_RECIPE = "quant_recipe"
_READS_RECIPES = "TEQuantizationParams"
_PLACES = (f"{TARGET.module}:{METHOD}",)
_KNOWN = {"202492332c2c2fd7": "0.15.0 to 0.18.2"}
_REPAIRED = table(
    _PLACES,
    {
        "0.19.0 to 0.19.2, main 5389d147b5 (2026-07-10) to 86e928a97f, dev to d48bd6be0a": "5fb54977d0f5a314",
        "main fbbc142b80 (2026-08-20) to d98e8a64dd": "8b3bd7016d4f12bb",
    },
)


def probe(tree: SourceTree) -> Finding:
    """Return whether layers that a recipe quantizes are told that a step begins."""
    source, engine = tree.module(TARGET.module), tree.module(ENGINE)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    if plain_class(source, CLASS) is None:
        return absent(f"defines no {CLASS}", source)
    if (method := plain_function(source, METHOD)) is None:
        return absent(f"defines no {METHOD}", source)
    body = meaning(tree, _PLACES[0])  # also of what is absent: a definition that cannot be read may be anything
    if engine is None or _READS_RECIPES not in engine.text:
        return absent("no recipe says what Transformer Engine quantizes", engine)
    if (read_in := _KNOWN.get(body)) is not None:
        seen = f"{METHOD} does nothing where only a recipe quantizes, as in {read_in}"
        return broken(NOT_TOLD, at(source, method, seen))
    if _RECIPE in words(method) or _RECIPE in source.text:
        return judged(tree, _REPAIRED, at(source, method, f"{METHOD} knows recipes"), places=_PLACES)
    raise unknown(source, method, f"nobody read {METHOD} as it is: {body}")
