"""Probe for gradients of norms that Megatron sums over tensor parallel ranks by the names of their weights.

Without sequence parallelism a replica has a part of its gradient where its rank has some heads alone behind it, and all of it else. The
finalizer sums what has `q_layernorm` or `k_layernorm` in its name, which is right for norms of heads.

    up to 0.9.0                   neither a multi-latent attention nor a gated delta net: ABSENT
    0.10.0 and 0.11.0             not read: UNRECOGNISED
    0.12.0 to 0.12.3              the norm of latent queries is summed as well, by `_allreduce_layernorm_grads`: BROKEN
    0.13.0 to 0.15.3              the same, by `_allreduce_non_tensor_model_parallel_grads`: BROKEN
    0.16.0 to 0.19.2, main, dev   the same, and the output norm of gated delta nets is not: BROKEN

No tree has a repair. A seam chooses anew what is summed, so whatever else could choose must be as it was read: what
finalizes, where latent queries come from and go to, what makes both norms, and where the one of outputs is used.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452
"""

from __future__ import annotations

import ast

from megacpp_overlays.feature_probes import mla_rope_key_gradient as latent
from megacpp_overlays.feature_probes.definitions import calls, plain_class, plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.known_bodies import check_known, plain_subclass
from megacpp_overlays.feature_probes.repairs import Repairs, judged
from megacpp_overlays.model import Evidence, Finding, Target
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import ModuleSource, SourceTree

FUNCTION, OLD_FUNCTION = "_allreduce_non_tensor_model_parallel_grads", "_allreduce_layernorm_grads"
TARGET = Target(distribution="megatron-core", module="megatron.core.distributed.finalize_model_grads", symbol=FUNCTION)
BY_NAME, OLD_BY_NAME = "summed-by-name", "layer-norms-summed-by-name"

ATTENTION, ATTENTION_CLASS = latent.TARGET.module, "MLASelfAttention"
NET = "megatron.core.ssm.gated_delta_net"
NETS = {f"{NET}.common": "_GDNBase", NET: "GatedDeltaNet"}
"""Where the class is that makes and uses the output norm: since 0.19.0, and up to 0.18.2."""
QUERIES, QUERY_NORM, OUTPUT_NORM = "get_query_key_value_tensors", "q_layernorm", "out_norm"
GATED_NORM = "_apply_gated_norm"
NAMES = (QUERY_NORM, "k_layernorm")
"""What is summed by its name."""

_BODIES = {
    "a361473f71a3edaa": "0.12.0 to 0.12.3",
    "5252a04dabf7800c": "0.13.0 and 0.13.1",
    "c5791bc3d69fa0b4": "0.14.0",
    "79e82f26c442bba5": "0.15.0 to 0.19.2, main d98e8a64dd and dev d48bd6be0a",
}
_OLD_CONSTRUCTORS = {"214ba155ea71b8a3", "380059f5ab6d3e8e"}
"""Of multi-latent attention, 0.12 and 0.13."""
_NET_CONSTRUCTORS = {
    *("8d35d81a19a05195", "8a0124ccb75296ed", "82d994d6e70a8526"),  # 0.16, 0.17 and 0.18
    *("594a48f00c4c3c4f", "951931dd745cd1db", "5f20f507b98e4f4c"),  # 0.19, main d98e8a64dd and dev d48bd6be0a
}
_GATED_NORMS = {"308b19de1975f5c0"}
"""Since 0.16.0."""
_USES = 3
"""How often code speaks of an output norm: what builds it, what it is built of, and where it is used."""
_CHOICES = {OUTPUT_NORM, "multi_latent_attention", ATTENTION_CLASS}
"""What a finalizer may ask that knows better."""

_PLACES = (
    f"{TARGET.module}:{FUNCTION}",
    f"{TARGET.module}:finalize_model_grads",
    "megatron.core.transformer.attention:SelfAttention.__init__",
    f"{ATTENTION}:{ATTENTION_CLASS}.__init__",
    f"{ATTENTION}:{ATTENTION_CLASS}.{QUERIES}",
    *(f"{module}:{name}.__init__" for module, name in NETS.items()),
    *(f"{module}:{name}.{GATED_NORM}" for module, name in NETS.items()),
)
"""Where a repair has to be read."""
_REPAIRED: Repairs = {}
"""No repair was merged yet."""


def probe(tree: SourceTree) -> Finding:
    """Return whether gradients of norms are summed by name."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no {TARGET.module}")
    attention, net = tree.module(ATTENTION), _net(tree)
    if (attention is None or plain_class(attention, ATTENTION_CLASS) is None) and net is None:
        return absent("there is neither a multi-latent attention nor a gated delta net", attention)
    name, function = FUNCTION, plain_function(source, FUNCTION)
    if function is None:
        name, function = OLD_FUNCTION, plain_function(source, OLD_FUNCTION)
    if function is None:
        raise unknown(source, None, f"there is no {FUNCTION}")
    body = fingerprint(function)
    if body not in _BODIES and _knows_better(function):
        differs = at(source, function, f"{name} does not sum by {' and '.join(NAMES)} alone")
        return judged(tree, _REPAIRED, differs, places=_PLACES)
    if body not in _BODIES:
        raise unknown(source, function, f"nobody read {name} as it is: {body}")
    if len(calls(source.syntax, name)) != 1 or source.bindings.changes(name):
        raise unknown(source, function, f"{name} is not called once, as it is")
    if attention is None:
        raise unknown(source, function, f"there is no {ATTENTION}")
    _check_attention(attention)
    seen = f"gradients of latent queries' norms are summed over tensor parallel ranks for their names, as in {_BODIES[body]}"
    evidence = [at(source, function, seen)]
    if net is not None:
        evidence.append(_check_net(tree, *net))
    return broken(BY_NAME if name == FUNCTION else OLD_BY_NAME, *evidence)


def _knows_better(function: ast.FunctionDef) -> bool:
    """Return whether a function does not choose by the names of norms of heads alone."""
    said = words(function) | {
        str(each.value) for each in ast.walk(function) if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }
    return QUERY_NORM not in said or not _CHOICES.isdisjoint(said)


def _net(tree: SourceTree) -> tuple[ModuleSource, str] | None:
    """Return the module of the gated delta net, and the name of the class that has the norm."""
    for module, name in NETS.items():
        if (source := tree.module(module)) is not None:
            return source, name
    return None


def _check_attention(source: ModuleSource) -> None:
    """Check that latent queries are normed and projected as it was read.

    Raises:
        SourceError: something differs.
    """
    plain_subclass(source, ATTENTION_CLASS, base="MultiLatentAttention")
    check_known(source, latent.METHOD, latent.METHODS)
    constructor = f"{ATTENTION_CLASS}.__init__"
    check_known(source, constructor, latent.CONSTRUCTORS[constructor] | _OLD_CONSTRUCTORS)
    fused = latent.FUSED_DOWN.partition(".")[0]
    others = {**latent.DOWN_PROJECTIONS, f"{fused}.__init__": latent.CONSTRUCTORS[f"{fused}.__init__"]}
    for symbol, bodies in others.items():
        if source.bindings.of(symbol):
            check_known(source, symbol, bodies)
    if own := source.bindings.of(f"{fused}.{QUERIES}"):
        raise unknown(source, own[0], f"{fused} has a {QUERIES} of its own")


def _check_net(tree: SourceTree, source: ModuleSource, name: str) -> Evidence:
    """Check that output norms are made and used as it was read.

    Returns:
        What was seen.

    Raises:
        SourceError: something differs.
    """
    cls = plain_subclass(source, name, base="MegatronModule")
    check_known(source, f"{name}.__init__", _NET_CONSTRUCTORS)
    check_known(source, f"{name}.{GATED_NORM}", _GATED_NORMS)
    uses = [each for each in ast.walk(source.syntax) if isinstance(each, ast.Attribute) and each.attr == OUTPUT_NORM]
    if len(uses) != _USES:
        raise unknown(source, cls, f"{OUTPUT_NORM} is used {len(uses)} times and not {_USES}")
    for module in (f"{NET}.gdn", f"{NET}.gdn2") if source.name != NET else ():
        other = tree.module(module)
        if other is not None and OUTPUT_NORM in words(other.syntax):
            raise unknown(other, None, f"{module} speaks of {OUTPUT_NORM}")
    return at(source, cls, "gradients of gated delta nets' output norms, which are of the heads of a rank, are not")
