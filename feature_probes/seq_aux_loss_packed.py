"""Probe layers that un-flatten packed samples for their MoE router: a rank may hold a shard of them alone.

A packed microbatch of several samples is one row of all their tokens. `TransformerLayer._maybe_unflatten_for_moe` gives it an axis of
samples back, so that the router balances each of them. It counts samples in what the layer holds, with the length that a sample has
on all ranks. Under sequence parallelism a layer holds one of as many shards as there are tensor parallel ranks.

    up to 0.18.2                 a row does not say how long its samples are: ABSENT
    0.19.0 to 0.19.2, main, dev  counted in the shard (#5696): BROKEN

No tree has a repair: #5996 was closed. One that asks for the rank, or for sequence parallelism, looks repaired.

The seams tell a router which samples its shard has tokens of, and give upstream's loss sums over these. So the loss must be one that
was read, with what counts tokens for it, what multiplies, and what calls it; and layers must give the method their shard, and no more.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5996
"""

from __future__ import annotations

import ast

from megacpp_overlays.feature_probes.definitions import calls, plain_class, plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import Repairs, judged, meaning
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import ModuleSource, SourceTree

LAYER = "TransformerLayer"
MOE_LAYER = "MoETransformerLayer"
UNFLATTEN = f"{LAYER}._maybe_unflatten_for_moe"
REFLATTEN = f"{LAYER}._maybe_reflatten_from_moe"
ROUTER = "TopKRouter"
LOSS = f"{ROUTER}._apply_seq_aux_loss"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.transformer_layer", symbol=UNFLATTEN)
ROUTER_TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.moe.router", symbol=LOSS)
EXPERTS = "MoELayer.forward"
EXPERTS_TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.moe.moe_layer", symbol=EXPERTS)
"""Defers routing to a recomputation, which runs in the backward pass."""
CALLER = f"{LAYER}._forward_mlp"
CALLER_OF_DEV = f"{LAYER}._forward_mlp_output_with_bias"
"""Calls the method and then the MoE layer."""
UTILS = "megatron.core.transformer.moe.moe_utils"
PARAMS = "megatron.core.packed_seq_params"
IN_THE_SHARD = "counted-in-the-shard"
IN_THE_SHARD_OF_DEV = "counted-in-the-shard-before-the-bias"

_WIDTH = "tokens_per_sample"
_SHARDED = {"sequence_parallel", "rank", "get_rank", "get_tensor_model_parallel_rank", "moe_seq_idx"}
"""What a method that knows of shards cannot do without; the last is the name that #5996 gives the owner of a token."""
_PLACES = (
    f"{ROUTER_TARGET.module}:{LOSS}",
    f"{ROUTER_TARGET.module}:{ROUTER}.routing",
    f"{UTILS}:get_tokens_per_expert_and_token_count",
    f"{UTILS}:switch_load_balancing_loss_func",
)
_UNFLATTENS = "32195fd7f7ba2b1c 72c20b205123e96a"
"""The bodies of the two methods of a layer, alike since #5696."""
_CALLERS = {
    f"{LAYER}._forward_mlp d26cc45cd2fa0593, {MOE_LAYER}._forward_mlp cfa51963543b55f3",
    f"{LAYER}._forward_mlp d26cc45cd2fa0593, {MOE_LAYER}._forward_mlp 8d304eee5c2f5525",
    f"{LAYER}._forward_mlp 8a8d29c9e5f13507, {MOE_LAYER}._forward_mlp 8d304eee5c2f5525",
    f"{LAYER}._forward_mlp_output_with_bias 73359d0fb55a8eab, {MOE_LAYER}._forward_mlp d5c3650d510797ec",
}
"""What gives them its rows: in 0.19.0 to 0.19.2 and main until 2026-08-12, until 2026-08-16, until 2026-08-22, and in dev."""
_KNOWN = {
    "6760b767a6f97bff 82aad988da3bbc5c f2fe298ab096bf1e 60a8c04237cf8abf": "0.19.0 to 0.19.2, main until 2026-08-22",
    "dbe73752c7670001 9b8d3ec574be1a51 b1c766756a02a0b6 38ed9103a8e142cf": "dev of 2026-07-20 to 2026-08-21",
}
_EXPERTS = {
    "a5eafab221f1ece0 8ceec8e17d9b3ce5": "0.19.0 to 0.19.2, main until 2026-08-22",
    "6e88d926891553e0 81df467e140511ec": "dev of 2026-08-21",
}
"""The bodies of `MoELayer.forward` and of `MoELayer.route`, which asks the router."""
_REPAIRED: Repairs = {}
"""No repair was merged yet."""


def probe(tree: SourceTree) -> Finding:
    """Return whether a layer counts samples in its shard."""
    return _probe(tree, TARGET)


def probe_router(tree: SourceTree) -> Finding:
    """Return the same, with what the router does about it."""
    return _probe(tree, ROUTER_TARGET)


def probe_experts(tree: SourceTree) -> Finding:
    """Return the same, with what an MoE layer recomputes."""
    return _probe(tree, EXPERTS_TARGET)


def _probe(tree: SourceTree, target: Target) -> Finding:
    source = tree.module(target.module)
    if source is None:
        return absent(f"there is no module {target.module}")
    layer, router = tree.module(TARGET.module), tree.module(ROUTER_TARGET.module)
    if layer is None:
        return absent(f"there is no module {TARGET.module}")
    method = _method(layer, LAYER, UNFLATTEN)
    if target is not TARGET and _method(source, target.symbol.partition(".")[0], target.symbol) is not None:
        # A definition that cannot be read may be anything, and is not absent.
        meaning(tree, f"{target.module}:{target.symbol}")
    if method is None:
        for each in (layer, router, tree.module(PARAMS)):
            if each is not None and _WIDTH in each.text:
                raise unknown(each, None, f"there is no {UNFLATTEN}, and {_WIDTH} is mentioned")
        return absent("a row does not say how long its samples are", layer)
    if router is None:
        raise unknown(layer, method, f"there is no module {ROUTER_TARGET.module}")
    if words(method) & _SHARDED:
        seen = at(layer, method, f"{UNFLATTEN} knows of shards")
        own = [UNFLATTEN, *_callers(layer)]
        return judged(tree, _REPAIRED, seen, places=(*(f"{TARGET.module}:{each}" for each in own), *_PLACES))
    back, loss = _method(layer, LAYER, REFLATTEN), _method(router, ROUTER, LOSS)
    if back is None or loss is None:
        raise unknown(layer, method, f"there is no {REFLATTEN if back is None else LOSS}")
    bodies = f"{fingerprint(method)} {fingerprint(back)}"
    found = " ".join(meaning(tree, where) for where in _PLACES)
    read_in = _KNOWN.get(found)
    callers = ", ".join(f"{name} {fingerprint(caller)}" for name, caller in _callers(layer).items())
    if callers not in _CALLERS:
        raise unknown(layer, method, f"nobody read {UNFLATTEN} called by {callers}")
    if bodies != _UNFLATTENS or read_in is None:
        raise unknown(layer, method, f"nobody read {UNFLATTEN} {bodies} with {LOSS} {found}")
    if target is TARGET:
        shape = IN_THE_SHARD_OF_DEV if CALLER_OF_DEV in _callers(layer) else IN_THE_SHARD
        return broken(shape, at(layer, method, f"samples are counted in a rank's shard, as in {read_in}"))
    if target is EXPERTS_TARGET:
        return _of_experts(tree)
    return broken(IN_THE_SHARD, at(router, loss, f"not told which samples a shard is of, as in {read_in}"))


def _of_experts(tree: SourceTree) -> Finding:
    source = tree.module(EXPERTS_TARGET.module)
    assert source is not None  # noqa: S101 - it was asked for before
    forward, cls = _method(source, "MoELayer", EXPERTS), plain_class(source, "MoELayer")
    routes = [each for each in cls.body if getattr(each, "name", None) == "route"] if cls is not None else []
    bodies = f"{fingerprint(forward)} {' '.join(map(fingerprint, routes))}"
    if forward is None or (read_in := _EXPERTS.get(bodies)) is None:
        raise unknown(source, forward, f"nobody read {EXPERTS} and MoELayer.route {bodies}")
    return broken(
        IN_THE_SHARD, at(source, forward, f"a recomputation is not told of which samples a shard is, as in {read_in}")
    )


def _callers(layer: ModuleSource) -> dict[str, ast.FunctionDef]:
    """Return the methods that call the one of a layer, by name.

    Raises:
        SourceError: something else calls it, or one of them does not stand alone.
    """
    name = UNFLATTEN.rpartition(".")[2]
    classes = [each for each in layer.syntax.body if isinstance(each, ast.ClassDef) and calls(each, name)]
    methods = {
        f"{cls.name}.{each.name}": each
        for cls in classes
        for each in cls.body
        if isinstance(each, ast.FunctionDef) and calls(each, name)
    }
    alone = [each for symbol, each in methods.items() if plain_function(layer, symbol) is each]
    if sum(len(calls(each, name)) for each in alone) != len(calls(layer.syntax, name)):
        raise unknown(layer, None, f"{name} is called by more than {', '.join(methods)}")
    return methods


def _method(source: ModuleSource, owner: str, symbol: str) -> ast.FunctionDef | None:
    return plain_function(source, symbol) if plain_class(source, owner) is not None else None
