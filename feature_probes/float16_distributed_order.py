"""Does `DistributedOptimizer` look up a parameter's state where it put it?

Its constructor records the position of each parameter in grad-buffer order, then installs each group as fp32 shards
first, copies of float16 shards after them. With both kinds in one group the two orders differ. Restoring state also
copies into a view of an fp32 parameter that autograd tracks. Releases 0.13.0 to 0.19.2 and main have both; dev has
repaired both since 2026-07-18.
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
    module="megatron.core.optimizer.distrib_optimizer",
    symbol="DistributedOptimizer",
)

STALE_ORDER = "stale-order"

_MAP = "self.model_param_group_index_map"
_RESTORE = "_set_main_param_and_optimizer_states"
_KNOWN = {
    "__init__": frozenset({"3b39cbefbe8ade4b", "cca4de6ad5de5751", "9f50f2924ad6a1bc", "4fd22571854dfc5f"}),
    "_build_optimizer_group_ranges": frozenset({"48d30b433dd47413"}),
    "_build_model_and_main_param_groups": frozenset(
        {"d3b9ec843d7b5fe0", "189aa2fd2b7cee02", "cddbef4c0da0fb8d", "27725fe072b02207"}
    ),
    "_get_main_param_and_optimizer_states": frozenset({"1f985891d60ba90d", "b3ebdb49fee2a4f9", "ebff2424af03350f"}),
    _RESTORE: frozenset({"d1660ba11e6b8294", "2097a2ad2385a1c1", "f014b8476ec8181a"}),
}
"""Bodies of the releases from 0.13.0 to 0.19.2; main d98e8a64dd has those of 0.19.2."""


def probe(tree: SourceTree) -> Finding:
    """Return whether the recorded positions are those of the installed groups.

    Source: https://github.com/NVIDIA/Megatron-LM/issues/2777 and /pull/5835
    """
    source = tree.module(TARGET.module)
    if source is None:
        return conclusion(Verdict.ABSENT, None, Evidence(seen=f"there is no module {TARGET.module}"))
    try:
        if TARGET.symbol not in source.text:
            return conclusion(Verdict.ABSENT, None, Evidence(seen=f"defines no {TARGET.symbol}", file=source.path))
        found = methods(source, TARGET.symbol)
        if _records_again(found.get("__init__")) and _restores_without_autograd(found.get(_RESTORE)):
            line = found["__init__"].lineno
            seen = Evidence(seen="positions are recorded again after the groups are built", file=source.path, line=line)
            return conclusion(Verdict.FIXED, None, seen)
        if (surprise := unknown(source, TARGET.symbol, _KNOWN)) is not None:
            return unrecognised(surprise)
    except SourceError as error:
        return unrecognised(Evidence(seen=str(error)))
    line = found["__init__"].lineno
    seen = Evidence(seen="positions are recorded before each group is reordered by dtype", file=source.path, line=line)
    return conclusion(Verdict.BROKEN, STALE_ORDER, seen)


def _records_again(init: FunctionNode | None) -> bool:
    """Return whether entries of the map are set in a loop over the fp32 and the float16 groups."""
    loops = [node for node in init.body if isinstance(node, ast.For)] if init else []
    return any(
        any(isinstance(node, ast.Subscript) and ast.unparse(node.value) == _MAP for node in _targets(loop))
        and all(name in ast.unparse(loop.iter) for name in ("self.model_fp32_groups", "self.model_float16_groups"))
        for loop in loops
    )


def _restores_without_autograd(restore: FunctionNode | None) -> bool:
    """Return whether every copy happens under `torch.no_grad()`."""
    if restore is None:
        return False
    scopes = [
        node
        for node in ast.walk(restore)
        if isinstance(node, ast.With) and "torch.no_grad()" in {ast.unparse(item.context_expr) for item in node.items}
    ]
    inside = [node for scope in scopes for node in _copies(scope)]
    return bool(inside) and len(inside) == len(_copies(restore))


def _targets(statement: ast.stmt) -> list[ast.expr]:
    return [target for node in ast.walk(statement) if isinstance(node, ast.Assign) for target in node.targets]


def _copies(node: ast.AST) -> list[ast.Call]:
    return [
        call
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "copy_"
    ]
