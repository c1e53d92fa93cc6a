"""Probe for a z-loss of a repeated prediction layer that is divided by the number of predictions after it is attached.

`TopKRouter.apply_z_loss` attaches the loss to the logits, and divides it afterwards: what is logged is divided, gradients are not.

    up to 0.16.1            no layer is used more than once: ABSENT
    0.17.0 to 0.19.2, main  divided afterwards: BROKEN. Main says so in a comment since 2026-08-21 (#6748)
    dev since 2026-07-03    divided before: FIXED

The seam gives upstream's method a smaller coefficient, which upstream multiplies the loss with and divides the logged one by. So
the method must be one that was read.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6748
"""

from __future__ import annotations

import ast

from megacpp_overlays.feature_probes.definitions import calls, plain_class, plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import judged, meaning, table
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.trees import SourceTree

ROUTER = "TopKRouter"
METHOD = f"{ROUTER}.apply_z_loss"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.moe.router", symbol=METHOD)
AFTERWARDS = "divided-afterwards"

_PREDICTIONS = "mtp_num_layers"
_REPEATED = "mtp_use_repeated_layer"
_ATTACHES = "MoEAuxLossAutoScaler"
_PLACES = (f"{TARGET.module}:{METHOD}", f"{TARGET.module}:{_ATTACHES}")
_KNOWN = {
    "7249f35d5e3471d3": "0.17.0 and 0.17.1",
    "6f9d715be3b3a07e": "0.18.0 to 0.18.2",
    "565cfda15b133db4": "0.19.0 to 0.19.2, main until 2026-08-22",
}
_REPAIRED = table(_PLACES, {"dev bfa33263ca (2026-07-03) to d48bd6be0a": "bb2e387dbc017fce 2d8d32308834fd55"})


def probe(tree: SourceTree) -> Finding:
    """Return whether gradients of a repeated layer's z-loss count once for each prediction."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    method = plain_function(source, METHOD) if plain_class(source, ROUTER) is not None else None
    if method is None:
        if "z_loss" in source.text:
            raise unknown(source, None, f"there is no {METHOD} that is defined here")
        return absent(f"defines no {METHOD}", source)
    body = meaning(tree, _PLACES[0])
    if (read_in := _KNOWN.get(body)) is not None:
        seen = f"the loss is attached, and divided by {_PREDICTIONS} afterwards, as in {read_in}"
        return broken(AFTERWARDS, at(source, method, seen))
    if _REPEATED not in words(method):
        if _REPEATED in source.text:
            raise unknown(source, method, f"{METHOD} knows no {_REPEATED}, and the module does")
        return absent("no layer is used for more than one prediction", source)
    attached = [each.lineno for each in calls(method, "apply") if _ATTACHES in words(each)]
    divided = [
        each.lineno for each in ast.walk(method) if isinstance(each, ast.Attribute) and each.attr == _PREDICTIONS
    ]
    if attached and min(divided) < min(attached):
        seen = f"{_PREDICTIONS} is asked for before the loss is attached"
        return judged(tree, _REPAIRED, at(source, method, seen), places=_PLACES)
    raise unknown(source, method, f"{METHOD} has an unknown body {body}")
