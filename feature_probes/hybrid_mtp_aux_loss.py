"""Probe `HybridStack` for MoE layers of multi-token prediction that are not marked as such.

A router that does not know it takes its layer for one of the decoder. Where one layer stands for all predictions its balancing loss
then counts once for each of them, and it is logged for a layer of the decoder.

    up to 0.16.1            no layer is used more than once: ABSENT
    0.17.0 and 0.17.1       the stack is in `mamba_block`, and nobody read it: UNRECOGNISED
    0.18.0 to 0.19.2, main  not told: BROKEN
    main since 2026-08-21   told (#6748): FIXED. Dev since 2026-07-13

The seam tells routers once they are made, which is in time if they ask when they compute the loss. So that must be as it was read.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6748
"""

from __future__ import annotations

import ast

from megacpp_overlays.feature_probes.definitions import called, calls, plain_class, plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import judged, meaning, table
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.trees import SourceTree

STACK = "HybridStack"
CONSTRUCTOR = f"{STACK}.__init__"
TARGET = Target(distribution="megatron-core", module="megatron.core.models.hybrid.hybrid_block", symbol=CONSTRUCTOR)
OLD_STACK = "megatron.core.ssm.mamba_block"
ROUTER = "megatron.core.transformer.moe.router"
NOT_TOLD = "not-told"

_FLAG = "is_mtp_layer"
_LAYER = "megatron.core.transformer.transformer_layer"
_MOE = "megatron.core.transformer.moe.moe_layer"
_LOSS = f"{ROUTER}:TopKRouter.attach_and_log_load_balancing_loss"
_STACKS = {
    "42797afff234d84d": "0.18.0 to 0.18.2",
    "0ccb710ab3f8ea5f": "0.19.0 to 0.19.2, main of 2026-08-10",
    "fe9a7f3e242f41ff": "main of 2026-08-11 to 2026-08-19",
    "a199c7e109c40257": "main of 2026-08-20",
}
"""What stands at the constructor of the stack."""
_LOSSES = {"61f82e3d68a041ab", "ce611162c0f20814"}
"""What divides the loss where a router is told: 0.18.0 to 0.18.2, and 0.19.0 to main of 2026-08-22."""
_PLACES = (
    f"{TARGET.module}:{CONSTRUCTOR}",
    f"{_LAYER}:TransformerLayer.__init__",
    f"{_LAYER}:MoETransformerLayer.__init__",
    f"{_MOE}:MoELayer.__init__",
    f"{_MOE}:BaseMoELayer.__init__",
    f"{ROUTER}:TopKRouter.__init__",
    f"{ROUTER}:Router.__init__",
    _LOSS,
)
_REPAIRED = table(
    _PLACES,
    {
        "main 2e12e2cf71 (2026-08-21) to d98e8a64dd": "a352957269dd8be8 2ffe7ee422209e30 239e18fb94cda552 fd3e876563dd662f "
        "1b0e898e14a17eb1 5b8143c483f78ea5 9e6749ad987da230 ce611162c0f20814",
        "dev a5e420afa6 (2026-07-13) to d48bd6be0a": "7e9f5fb9d561c66a 3326456b8a424dec 40c8659ffeba0881 25b3c056ccbf24c4 "
        "891e7d0ef1bae581 7d904f80b07a10a3 325e3087e2ccb314 9205c9ccbdd4e4ef",
    },
)


def probe(tree: SourceTree) -> Finding:
    """Return whether MoE layers of a prediction are made as those of the decoder are."""
    source = tree.module(TARGET.module)
    if source is None:
        older = tree.module(OLD_STACK)
        if older is not None and _FLAG in older.text:
            raise unknown(older, None, f"there is no {TARGET.module}, and {_FLAG} is mentioned")
        return absent(f"there is no {TARGET.module}")
    if plain_class(source, STACK) is None:
        return absent(f"defines no {STACK}", source)
    constructor = plain_function(source, CONSTRUCTOR)
    if constructor is None:
        raise unknown(source, None, f"{STACK} has no constructor")
    if any(_is_told(each) for each in calls(constructor)):
        seen = f"{CONSTRUCTOR} tells MoE layers whether they predict"
        return judged(tree, _REPAIRED, at(source, constructor, seen), places=_PLACES)
    stack, loss = meaning(tree, _PLACES[0]), meaning(tree, _LOSS)
    if stack not in _STACKS or loss not in _LOSSES:
        raise unknown(source, constructor, f"nobody read {CONSTRUCTOR} {stack} with {_LOSS} {loss}")
    seen = f"MoE layers are not told that they predict, as in {_STACKS[stack]}"
    return broken(NOT_TOLD, at(source, constructor, seen))


def _is_told(call: ast.Call) -> bool:
    """Return whether a call makes an MoE layer with the flag."""
    named = {each.arg for each in call.keywords}
    return called(call) == "build_module" and "moe_layer" in words(call) and bool({_FLAG, None} & named)
