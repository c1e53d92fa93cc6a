"""Do Mamba-3's MIMO backward functions sum the gradients of heads into any number of groups, or only into one or all?

With G groups for H heads the kernels read group `head // (H // G)` and write gradients for each head. The host then
sums them. In mamba-ssm 2.3.2.post1 it knows G = 1 and G = H and raises for what is between; on main one reducer takes
every G that divides H. The seam runs upstream's whole function, so no statement of the two modules may be unknown.

Branches of mamba-ssm that raise as well have other texts, which nobody has read for this; they are not recognised.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes.definitions import calls, plain_function
from megacpp_overlays.feature_probes.findings import absent, at, broken, fixed, unrecognised
from megacpp_overlays.model import Evidence, Finding, Target
from megacpp_overlays.source.fingerprint import fingerprint, is_docstring
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, SourceTree

_PACKAGE = "mamba_ssm.ops.tilelang.mamba3"
PLAIN = Target(distribution="mamba-ssm", module=f"{_PACKAGE}.mamba3_mimo_bwd", symbol="mamba_mimo_bwd_combined")
VARLEN = Target(
    distribution="mamba-ssm", module=f"{_PACKAGE}.mamba3_mimo_bwd_varlen", symbol="mamba_mimo_bwd_combined_varlen"
)
FACTORIES = ("mamba_mimo_bwd_fwd", "mamba_mimo_bwd_bwd")
"""What makes the two kernels, in both modules."""

ONE_OR_ALL = "one-or-all-groups"

_KNOWN = {
    PLAIN: "9d7ed0d7161170b5",
    VARLEN: "21a6cafc2c5af436",
}
"""Fingerprints of the two modules of 2.3.2.post1, docstrings aside: both kernels, their helpers and the host."""

REDUCER = "mamba_ssm.ops.triton.mamba3.grouped_head_reduction"
_REDUCE = "reduce_grouped_qk_grads_and_bias_triton"
_REDUCER_KNOWN = "2da46b59f02b0003"
"""Fingerprint of main's reducer, from 33e2849 (2026-06-08) to e9594ce (2026-07-23)."""


def probe_plain(tree: SourceTree) -> Finding:
    """Return what `mamba_mimo_bwd_combined` does with 1 < G < H.

    Source: https://github.com/state-spaces/mamba/pull/967
    """
    return _probe(tree, PLAIN)


def probe_varlen(tree: SourceTree) -> Finding:
    """Return what `mamba_mimo_bwd_combined_varlen` does with 1 < G < H; the same source."""
    return _probe(tree, VARLEN)


def _probe(tree: SourceTree, target: Target) -> Finding:
    source = tree.module(target.module)
    if source is None:
        return absent(f"there is no module {target.module}")
    try:
        function = plain_function(source, target.symbol)
    except SourceError as error:
        return unrecognised(Evidence(seen=str(error)))
    if function is None:
        return unrecognised(Evidence(f"there is a MIMO backward but no {target.symbol}", source.path))
    if calls(function, _REDUCE):
        return _probe_reducer(tree, source, function)
    if (seen := _text(source)) != _KNOWN[target]:
        return unrecognised(at(source, function, f"{target.symbol} is in an unknown text {seen}"))
    return broken(ONE_OR_ALL, at(source, _refusal(function), "sums gradients into one group or into all, else raises"))


def _text(source: ModuleSource) -> str:
    """Return the fingerprint of a module without its docstring."""
    return fingerprint([each for each in source.syntax.body if not is_docstring(each)])


def _refusal(function: FunctionNode) -> ast.AST:
    return next((each for each in ast.walk(function) if isinstance(each, ast.Raise)), function)


# Main


def _probe_reducer(tree: SourceTree, source: ModuleSource, function: FunctionNode) -> Finding:
    reducer = tree.module(REDUCER)
    if reducer is None:
        return unrecognised(at(source, function, f"calls {_REDUCE}, and there is no module {REDUCER}"))
    if (seen := _text(reducer)) != _REDUCER_KNOWN:
        return unrecognised(at(reducer, reducer.syntax, f"the reducer has an unknown text {seen}"))
    if (surprise := next(_surprises(source, function), None)) is not None:
        return unrecognised(at(source, function, f"{function.name} {surprise}"))
    return fixed(at(source, calls(function, _REDUCE)[0], f"sums gradients into any number of groups: {_REDUCE}"))


def _surprises(source: ModuleSource, function: FunctionNode) -> Iterator[str]:
    """Yield how a function that calls the reducer is not what main's is, as far as groups go."""
    if _imported_reducers(source) != [REDUCER]:
        yield f"does not take {_REDUCE} from {REDUCER} alone"
    results = _results(function)
    if len(results) != 4:
        yield f"does not name the four results of one {_REDUCE}(dq, dk, G) among its own statements"
    else:
        returned = [_names(each.value) for each in function.body if isinstance(each, ast.Return)]
        if len(returned) != 1 or returned[0][:2] != results[:2] or returned[0][6:8] != results[2:]:
            yield "does not return what was reduced"
    unpacked = "B, S, R, G, N = q.shape"
    bound = [each for each in ast.walk(function) if isinstance(each, ast.Name) and each.id == "G"]
    if [each for each in function.body if ast.unparse(each) == unpacked] == [] or _stores(bound) != 1:
        yield "does not take G from q alone"
    if any(isinstance(each, ast.Compare) and "G" in _used(each) for each in ast.walk(function)):
        yield "compares G with something"
    mapped = "i_h_qk = i_h // (H // G)"
    for name in FACTORIES:
        factory = source.function(name)
        if factory is None or [ast.unparse(each) for each in _assignments(factory, "i_h_qk")] != [mapped]:
            yield f"has kernels of {name} which do not map heads to groups by {mapped}"


def _imported_reducers(source: ModuleSource) -> list[str | None]:
    """Return what binds the name of the reducer: modules, and None for anything but an import of that very name."""
    found: list[str | None] = []
    for each in ast.walk(source.syntax):
        match each:
            case ast.ImportFrom(names=names):
                found += [each.module if alias.name == _REDUCE else None for alias in names if _binds(alias)]
            case ast.Name(id=name) if name == _REDUCE and not isinstance(each.ctx, ast.Load):
                found.append(None)
            case ast.FunctionDef(name=name) if name == _REDUCE:
                found.append(None)
    return found


def _binds(alias: ast.alias) -> bool:
    return _REDUCE in {alias.asname, alias.name if alias.asname is None else None}


def _results(function: FunctionNode) -> list[str]:
    """Return the names that get the four results, where the reducer is called once, under no condition, with G."""
    match [each for each in function.body if calls(each, _REDUCE)]:
        case [ast.Assign(targets=[ast.Tuple() as names], value=ast.Call(args=[ast.Name(), ast.Name(), groups]))] if (
            ast.unparse(groups) == "G"
        ):
            return _names(names)
    return []


def _names(node: ast.AST | None) -> list[str]:
    return [each.id if isinstance(each, ast.Name) else "" for each in getattr(node, "elts", ())]


def _stores(names: list[ast.Name]) -> int:
    return sum(not isinstance(each.ctx, ast.Load) for each in names)


def _used(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _assignments(function: FunctionNode, name: str) -> Iterator[ast.stmt]:
    for each in ast.walk(function):
        if isinstance(each, ast.Assign) and name in {ast.unparse(target) for target in each.targets}:
            yield each
