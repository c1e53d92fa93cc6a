"""Numbering of parameters in the sharded state of `Float16OptimizerWithFloat16Params` and in its inner optimizer.

Up to 0.19.2 ids are given to the float16 parameters alone, while the state enumerates every parameter of the inner
optimizer: fp32 copies, native fp32 parameters and frozen ones, in group order. Main and dev walk the parameter
groups of the inner optimizer instead.
"""

from __future__ import annotations

from megacpp_overlays.feature_probes.findings import absent, at, broken, fixed, unknown, unrecognised
from megacpp_overlays.feature_probes.known_bodies import changed_method, plain_subclass
from megacpp_overlays.model import Body, Finding, Target
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
    if TARGET.symbol not in source.text:
        return absent(f"defines no {TARGET.symbol}", source)
    plain_subclass(source, TARGET.symbol, base="MixedPrecisionOptimizer")
    method = source.function(f"{TARGET.symbol}.sharded_state_dict")
    if method is None:
        raise unknown(source, None, f"{TARGET.symbol} has no sharded_state_dict")
    if _walks_the_inner_optimizer(method):
        return fixed(
            at(source, method, "ids follow the groups of the inner optimizer"),
            repair=[Body(TARGET.module, TARGET.symbol)],
        )
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
