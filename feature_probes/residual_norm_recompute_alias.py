"""Probe `CheckpointWithoutOutput` for outputs that are freed although they are its own input.

It frees the storage of what a function returned, and computes it again in the backward pass. A norm that hands on its input as the residual,
as Transformer Engine's fused one does, has an output in the storage of the input, which the layer adds and the recomputation reads.

    up to 0.16.1            no norm of Megatron's returns its input: ABSENT. 0.12.0 to 0.16.1 free whatever is returned, too
    0.17.0 to 0.19.2, dev   freed: BROKEN
    main since 2026-08-19   kept where a norm says that it returns a residual (#4497): FIXED

The seam hides such an output from what frees and what restores, so how those go through outputs must be as it was read.

Source: https://github.com/NVIDIA/Megatron-LM/pull/4497
"""

from __future__ import annotations

from megacpp_overlays.feature_probes.definitions import plain_class, plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import judged, meaning, table
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.trees import SourceTree

CLASS = "CheckpointWithoutOutput"
METHOD = f"{CLASS}.checkpoint"
TARGET = Target(distribution="megatron-core", module="megatron.core.tensor_parallel.random", symbol=METHOD)
ENGINE = "megatron.core.extensions.transformer_engine"
LAYER = "megatron.core.transformer.transformer_layer"
CALLABLES = "megatron.core.models.gpt.fine_grained_callables"
FREED = "freed"

_NORM = "TEFusedResidualRMSNorm"
_FLAG = "retain_input_tensors"
_CHECKPOINT = (f"{TARGET.module}:{CLASS}", f"{TARGET.module}:CheckpointWithoutOutputFunction")
_MANAGERS = (f"{TARGET.module}:CheckpointWithoutOutputManager", f"{TARGET.module}:MHCCheckpointManager")
"""What frees outputs of several, on main and on dev."""
_KNOWN: dict[tuple[str, ...], str] = {
    ("57853d3de6b45a5c", "1bd51e048943eb35", "-", "-"): "0.17.0 to 0.19.2",
    ("d1d8e5743f88c43e", "3805e4a8a2f0447c", "92a8949e036fe162", "-"): "main of 2026-08-17 and 2026-08-18",
    ("38a63f50aecf51c2", "3805e4a8a2f0447c", "-", "f780d25ac21ad588"): "dev of 2026-08-18 to 2026-08-21",
}
_PLACES = (
    *_CHECKPOINT,
    _MANAGERS[0],
    f"{ENGINE}:TENorm",
    f"{LAYER}:*{_FLAG}",
    f"{LAYER}:*_input_layernorm_returns_residual",
    f"{LAYER}:*_pre_mlp_layernorm_returns_residual",
    f"{CALLABLES}:*{_FLAG}",
)
_LAYERS = "cdbb7178b6a0c4fa c8eb00dd31d75dd7 b3b557bd07f6255a a41c2230762bac32"
_REPAIRED = table(
    _PLACES,
    {
        "main 19deef67f9 (2026-08-19)": f"146e6a76730e2e89 bbca0f10ca8e55c8 34ec12acea24c333 e725fafce4cd8102 {_LAYERS}",
        "main cdf3c05911 (2026-08-22) to d98e8a64dd": "146e6a76730e2e89 bbca0f10ca8e55c8 34ec12acea24c333 c86ecbe50cfea81e "
        f"{_LAYERS}",
    },
)


def probe(tree: SourceTree) -> Finding:
    """Return whether an output that is the input is freed."""
    source, engine = tree.module(TARGET.module), tree.module(ENGINE)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    if (cls := plain_class(source, CLASS)) is None:
        return absent(f"defines no {CLASS}", source)
    if (method := plain_function(source, METHOD)) is None:
        raise unknown(source, cls, f"{CLASS} has no method checkpoint")
    found = tuple(meaning(tree, each) for each in (*_CHECKPOINT, *_MANAGERS))  # what cannot be read may be anything
    if engine is None or _NORM not in engine.text:
        return absent("no norm returns its input beside what it computes", engine)
    if _FLAG in words(cls):
        seen = f"{CLASS} can keep outputs that are in the storage of an input"
        return judged(tree, _REPAIRED, at(source, method, seen), places=_PLACES)
    if (read_in := _KNOWN.get(found)) is None:
        raise unknown(source, method, f"nobody read {CLASS} as it is: {' '.join(found)}")
    return broken(FREED, at(source, method, f"what a function returns is freed, its input, too, as in {read_in}"))
