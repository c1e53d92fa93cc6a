"""Does the sharded state of `Float16OptimizerWithFloat16Params` number its parameters like its inner optimizer?

Up to 0.19.2 ids are given to the float16 parameters alone, while the state enumerates every parameter of the inner
optimizer: fp32 copies, native fp32 parameters and frozen ones, in group order. Main and dev walk the parameter
groups of the inner optimizer instead.
"""

from __future__ import annotations

import ast

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes.findings import conclusion, unrecognised
from megacpp_overlays.feature_probes.known_bodies import methods, unknown
from megacpp_overlays.model import Evidence, Finding, Target, Verdict
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


def probe(tree: SourceTree) -> Finding:
    """Return whether ids are given over the float16 groups or over the inner optimizer.

    Source: https://github.com/NVIDIA/Megatron-LM/pull/5929
    """
    source = tree.module(TARGET.module)
    if source is None:
        return conclusion(Verdict.ABSENT, None, Evidence(seen=f"there is no module {TARGET.module}"))
    try:
        if TARGET.symbol not in source.text:
            seen = Evidence(seen=f"defines no {TARGET.symbol}", file=source.path)
            return conclusion(Verdict.ABSENT, None, seen)
        method = methods(source, TARGET.symbol).get("sharded_state_dict")
        if method is None:
            return unrecognised(Evidence(seen=f"{TARGET.symbol} has no sharded_state_dict", file=source.path))
        line = method.lineno
        if _walks_the_inner_optimizer(method):
            seen = Evidence(seen="ids follow the groups of the inner optimizer", file=source.path, line=line)
            return conclusion(Verdict.FIXED, None, seen)
        if (surprise := unknown(source, TARGET.symbol, _KNOWN)) is not None:
            return unrecognised(surprise)
    except SourceError as error:
        return unrecognised(Evidence(seen=str(error)))
    seen = Evidence(seen="optimizer ids are given to the float16 parameters alone", file=source.path, line=line)
    return conclusion(Verdict.BROKEN, FLOAT16_IDS, seen)


def _walks_the_inner_optimizer(method: FunctionNode) -> bool:
    """Return whether the id map is built once, from a local generator over `self.optimizer.param_groups`."""
    calls = [
        node
        for node in ast.walk(method)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "get_param_id_to_sharded_param_map"
    ]
    generators = {
        node.name
        for node in method.body
        if isinstance(node, ast.FunctionDef)
        and not node.decorator_list
        and any(isinstance(inner, ast.Yield) for inner in ast.walk(node))
        and any(ast.unparse(inner) == "self.optimizer.param_groups" for inner in ast.walk(node))
    }
    match calls:
        case [ast.Call(args=[_, ast.Call(func=ast.Name(id=name), args=[], keywords=[])], keywords=[])]:
            return not method.decorator_list and name in generators
        case _:
            return False
