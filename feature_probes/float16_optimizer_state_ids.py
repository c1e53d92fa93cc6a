"""Numbering of parameters in the sharded state of `Float16OptimizerWithFloat16Params` and in its inner optimizer.

Up to 0.19.2 ids are given to the float16 parameters alone, while the state enumerates every parameter of the inner
optimizer: fp32 copies, native fp32 parameters and frozen ones, in group order. Main and dev walk the parameter
groups of the inner optimizer instead.
"""

from __future__ import annotations

from megacpp_overlays.feature_probes.definitions import plain_class
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown, unrecognised
from megacpp_overlays.feature_probes.known_bodies import changed_method, plain_subclass
from megacpp_overlays.feature_probes.repairs import judged, table
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.patterns import Pattern
from megacpp_overlays.source.trees import FunctionNode, SourceTree

TARGET = Target(
    distribution="megatron-core",
    module="megatron.core.optimizer.optimizer",
    symbol="Float16OptimizerWithFloat16Params",
)

FLOAT16_IDS = "float16-ids"

_KNOWN = {
    "__init__": frozenset({"5cbd762d5775fc68", "1a7771c640319382"}),  # 0.13.0 to 0.18.2; 0.19.0 and 0.19.2
    "state_dict": frozenset({"12836ea5b6565ceb"}),
    "sharded_state_dict": frozenset({"7b9421bfaae00a6c", "867e083dedad30aa"}),  # the same two ranges
}

_SHARDING = "megatron.core.dist_checkpointing.optimizer"
_REPAIRED = table(
    (
        *(f"{TARGET.module}:{TARGET.symbol}.{name}" for name in ("__init__", "state_dict", "sharded_state_dict")),
        f"{TARGET.module}:_backfill_gtp_sharded_param_map",
        f"{_SHARDING}:get_param_id_to_sharded_param_map",
        f"{_SHARDING}:get_optim_param_to_id_map",
        f"{_SHARDING}:make_sharded_optimizer_tensor",
        f"{_SHARDING}:optim_state_to_sharding_state",
    ),
    {
        "head of pull request 5929 (2026-08-10)": "837486dd84008e7b 4f329ac3bd880c9d 4a857a9e0f0c1015 - "
        "6706751ff06a2966 84c61a6eb3085449 7ed1a126cdcf1344 360cd2017e48098c",
        "main 86e928a97f (2026-08-10)": "bdc16aa9b8775f2f 4f329ac3bd880c9d 5d05c2345b4b0deb 9f00694a578b4308 "
        "6706751ff06a2966 84c61a6eb3085449 7ed1a126cdcf1344 360cd2017e48098c",
        "main db57c152e6 (2026-08-11) to d98e8a64dd": "bdc16aa9b8775f2f 4f329ac3bd880c9d 5d05c2345b4b0deb 9f00694a578b4308 "
        "0548011578d18f51 84c61a6eb3085449 7ed1a126cdcf1344 360cd2017e48098c",
        "dev ec2aff43ef (2026-07-09) to 0e06d8120e": "837486dd84008e7b 4f329ac3bd880c9d 195d6b274093ea60 - "
        "6706751ff06a2966 84c61a6eb3085449 7ed1a126cdcf1344 360cd2017e48098c",
        "dev 86ba3a66d5 (2026-07-16) to 43124b60c2": "a0f4147db53c2b22 9ca3b0ab184aa4ba f494299b97fa571c - "
        "6706751ff06a2966 84c61a6eb3085449 7ed1a126cdcf1344 360cd2017e48098c",
        "dev 9050d4c5fb (2026-08-18) to d48bd6be0a": "a0f4147db53c2b22 9ca3b0ab184aa4ba 17f0cc163d87fc22 - "
        "6706751ff06a2966 84c61a6eb3085449 7ed1a126cdcf1344 360cd2017e48098c",
    },
)
"""Every commit of main and dev whose ids follow the inner optimizer, and the pull request; no release has that."""

_IDS = Pattern("get_param_id_to_sharded_param_map($$_)")
_IDS_OF_A_WALK = Pattern("get_param_id_to_sharded_param_map($_, $walk())")
_WALK = Pattern("def $name($$_): $$_")
_YIELD = Pattern("yield $_")
_GROUPS = Pattern("self.optimizer.param_groups")


def probe(tree: SourceTree) -> Finding:
    """Return whether ids are given over the float16 groups or over the inner optimizer.

    Source: https://github.com/NVIDIA/Megatron-LM/pull/5929
    """
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    if plain_class(source, TARGET.symbol) is None:
        return absent(f"defines no {TARGET.symbol}", source)
    plain_subclass(source, TARGET.symbol, base="MixedPrecisionOptimizer")
    method = source.function(f"{TARGET.symbol}.sharded_state_dict")
    if method is None:
        raise unknown(source, None, f"{TARGET.symbol} has no sharded_state_dict")
    if _walks_the_inner_optimizer(method):
        return judged(tree, _REPAIRED, at(source, method, "ids follow the groups of the inner optimizer"))
    if (surprise := changed_method(source, TARGET.symbol, _KNOWN)) is not None:
        return unrecognised(surprise)
    return broken(FLOAT16_IDS, at(source, method, "optimizer ids are given to the float16 parameters alone"))


def _walks_the_inner_optimizer(method: FunctionNode) -> bool:
    """Return whether the id map is built once, from a local generator over the groups of the inner optimizer."""
    walks = {
        walk.text("name")
        for statement in method.body
        if (walk := _WALK.match(statement)) and any(_YIELD.find(statement)) and any(_GROUPS.find(statement))
    }
    ids = [found.node for found in _IDS.find(method)]
    of_a_walk = _IDS_OF_A_WALK.match(ids[0]) if len(ids) == 1 else None
    return of_a_walk is not None and of_a_walk.text("walk") in walks and not method.decorator_list
