"""Probe the TileLang backend of DSA for the dimensions that it hands to its one kernel.

`fused_sparse_mla_absorbed` returns None, and its caller builds all scores, unless the query has 576 channels and the value
512, the number of heads is a power of two once it is 16 or more, indices come in blocks of 64, and everything is bfloat16.

    up to 0.18.2            no TileLang backend: ABSENT
    June 2026 (PR 5049)     one kernel call for each batch element, other guards: UNRECOGNISED
    0.19.0 to 0.19.2, main  BROKEN
    dev                     names a backend that is not in the tree: ABSENT

The seam is on `run_fused_absorbed_sparse_attention`, through which the backend calls the dispatcher, because
`fp8-quantized-unwrap` (pack 03) replaces the dispatcher itself. It asks the dispatcher first and relies on None for what
it declines, so both must be ones that were read. No repair has been seen: a dispatcher without 576 and 512 looks repaired.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5049
"""

from __future__ import annotations

import ast

from megacpp_overlays.feature_probes.definitions import plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import Repairs, judged, meaning
from megacpp_overlays.model import Evidence, Finding, Target
from megacpp_overlays.source.trees import FunctionNode, SourceTree

FUNCTION = "run_fused_absorbed_sparse_attention"
DISPATCHER = "fused_sparse_mla_absorbed"
TARGET = Target(
    distribution="megatron-core",
    module="megatron.core.transformer.experimental_attention_variant.ops.tilelang_dsa",
    symbol=FUNCTION,
)
ONE_KERNEL = "one-kernel"

_PLACES = (f"{TARGET.module}:{FUNCTION}", f"{TARGET.module}:{DISPATCHER}")
_BROKEN = {"ec616818dd714f35 27c5e8cf01bce421": "0.19.0 to 0.19.2 and main d98e8a64dd"}
_REPAIRED: Repairs = {}
"""No repair was read yet."""

_CHANNELS = {576, 512}


def probe(tree: SourceTree) -> Finding:
    """Return whether the dispatcher declines other channels, heads and numbers of indices."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    function, dispatcher = plain_function(source, FUNCTION), plain_function(source, DISPATCHER)
    if function is None or dispatcher is None:
        of_it = (word for word in words(source.syntax) if word == FUNCTION or "sparse_mla" in word.lower())
        if named := sorted(of_it):
            raise unknown(source, None, f"there is {named[0]}, but not both {FUNCTION} and {DISPATCHER}")
        return absent(f"defines neither {FUNCTION} nor {DISPATCHER}", source)
    found = " ".join(meaning(tree, place) for place in _PLACES)
    guard = _guard(dispatcher)
    if (read_in := _BROKEN.get(found)) is not None:
        seen = at(source, guard or dispatcher, f"{DISPATCHER} declines other channels than 576 and 512")
        return broken(ONE_KERNEL, seen, Evidence(seen=f"as in {read_in}"))
    if guard is None:
        nothing = at(source, dispatcher, f"{DISPATCHER} asks for no number of channels")
        return judged(tree, _REPAIRED, nothing, places=_PLACES)
    raise unknown(source, dispatcher, f"nobody read {FUNCTION} and {DISPATCHER} as they are: {found}")


def _guard(dispatcher: FunctionNode) -> ast.AST | None:
    """Return the first place that names the channels of the one kernel."""
    return next(
        (each for each in ast.walk(dispatcher) if isinstance(each, ast.Constant) and each.value in _CHANNELS), None
    )
