"""Probe MoE routers of Megatron for balancing losses that are multiplied by the tokens of all ranks in place of one rank's.

Where losses are taken for each token, a router multiplies its balancing loss by the tokens of the rank and by the
number of ranks. Under a padding mask it counts the tokens of the rank in the very sums that were just added up over ranks
in place.

    up to 0.15.3            no router counts tokens under a mask: ABSENT
    0.16.0 to 0.18.2        multiplied by the count alone, for which that of all ranks is right: ABSENT
    0.19.0 to 0.19.2, main  multiplied by the number of ranks as well: BROKEN
    dev                     multiplies by a count that is summed elsewhere, and was not read: UNRECOGNISED

No tree has a repair that gives the gradient of one rank. The one that is proposed (#7481) counts before the sum.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452, https://github.com/NVIDIA/Megatron-LM/pull/7481
"""

from __future__ import annotations

import ast

from megacpp_overlays.feature_probes.definitions import binders, calls, plain_function
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.known_bodies import check_known
from megacpp_overlays.feature_probes.repairs import Repairs, judged, meaning
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.trees import SourceTree

FUNCTION = "get_tokens_per_expert_and_token_count"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.moe.moe_utils", symbol=FUNCTION)
ROUTER = "megatron.core.transformer.moe.router"
COUNTED_TWICE = "counted-twice"

_LOSS = f"{ROUTER}:TopKRouter.attach_and_log_load_balancing_loss"
_LOSSES = tuple(f"{ROUTER}:TopKRouter._apply_{kind}" for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss"))
_PLACES = (f"{TARGET.module}:{FUNCTION}",)
_COUNTS = {"f2fe298ab096bf1e"}
"""What counts, since 0.16.0."""
_ONCE = {"3f00a7b8561c0670", "efb37f67373077a1", "61f82e3d68a041ab"}
"""What multiplies by a count alone: 0.16, 0.17 and 0.18."""
_TWICE = {"ce611162c0f20814": "0.19.0 to 0.19.2 and main d98e8a64dd"}
"""What multiplies by the number of ranks as well."""
_KINDS = ["b41e0c740af6e9f6", "6760b767a6f97bff", "da9e291907869940"]
"""What asks for the count, for each of the three losses."""
_SUMS = {
    "reduce_from_tensor_model_parallel_region": {"362295ba6089e8a5"},
    "_ReduceFromModelParallelRegion": {"8a0459bad416e23d"},
    "_reduce": {"0abc9c869eed29bc"},
}
"""What sums in place."""
_REPAIRED: Repairs = {}
"""No repair was merged yet."""


def probe(tree: SourceTree) -> Finding:
    """Return whether tokens are counted twice."""
    source, router = tree.module(TARGET.module), tree.module(ROUTER)
    if source is None:
        return absent(f"there is no {TARGET.module}")
    function = plain_function(source, FUNCTION)
    if function is None:
        return absent(f"defines no {FUNCTION}", source)
    if router is None:
        raise unknown(source, function, f"there is no {ROUTER}")
    counts, loss = meaning(tree, _PLACES[0]), meaning(tree, _LOSS)
    if counts in _COUNTS and loss in _ONCE:
        return absent("routers multiply by a count alone, for which that of all ranks is right", router)
    if loss not in _TWICE:
        raise unknown(router, None, f"nobody read {_LOSS} as it is: {loss}")
    kinds = [meaning(tree, each) for each in _LOSSES]
    if kinds != _KINDS:
        raise unknown(router, None, f"nobody read what asks {FUNCTION} as it is: {' '.join(kinds)}")
    if counts not in _COUNTS and _counts_first(function):
        seen = at(source, function, "tokens of the rank are counted before they are summed")
        return judged(tree, _REPAIRED, seen, places=(*_PLACES, _LOSS))
    if counts not in _COUNTS:
        raise unknown(source, function, f"nobody read {FUNCTION} as it is: {counts}")
    mappings = tree.module("megatron.core.tensor_parallel.mappings")
    if mappings is None:
        raise unknown(source, function, "there are no mappings")
    for name, bodies in _SUMS.items():
        check_known(mappings, name, bodies)
    return broken(
        COUNTED_TWICE, at(source, function, f"tokens of all ranks are taken for those of one, as in {_TWICE[loss]}")
    )


def _counts_first(function: ast.FunctionDef) -> bool:
    """Return whether the tokens of a rank are counted before anything is summed over ranks."""
    sums = [each.lineno for each in calls(function, "reduce_from_tensor_model_parallel_region")]
    counted = [each.lineno for each in binders(function, "local_num_tokens") if isinstance(each, ast.Name)]
    return bool(sums and counted) and min(counted) < min(sums)
