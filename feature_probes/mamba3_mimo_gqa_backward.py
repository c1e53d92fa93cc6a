"""The MIMO backward functions of Mamba-3, and into how many groups they sum the gradients of heads.

With G groups for H heads the kernels read group `head // (H // G)` and write gradients for each head. The host then
sums them. In mamba-ssm 2.3.2.post1 it knows G = 1 and G = H and raises for what is between; on main one reducer takes
every G that divides H. The seam runs upstream's whole function, so no statement of the two modules may be unknown.

Branches of mamba-ssm that raise as well have other texts, which nobody has read for this; they are not recognised.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from megacpp_overlays.feature_probes.definitions import binders, calls, plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import judged, table
from megacpp_overlays.model import Body, Finding, Target
from megacpp_overlays.source.fingerprint import fingerprint, is_docstring
from megacpp_overlays.source.patterns import Pattern
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
REDUCE = "reduce_grouped_qk_grads_and_bias_triton"
_REDUCER_TEXT = "2da46b59f02b0003"
_REPAIRED = {
    PLAIN: table(
        (f"{PLAIN.module}:", f"{REDUCER}:"),
        {
            "main 33e2849 (2026-06-08)": f"5a2182f816cfc661 {_REDUCER_TEXT}",
            "main b3cae1b (2026-06-10) to e9594ce": f"191664458ff4036b {_REDUCER_TEXT}",
        },
    ),
    VARLEN: table(
        (f"{VARLEN.module}:", f"{REDUCER}:"),
        {"main 33e2849 (2026-06-08) to e9594ce": f"39d2011f3dcd3498 {_REDUCER_TEXT}"},
    ),
}
"""The whole modules, kernels and all, and that of the reducer, in every commit of main that has it."""
_TEXTS = {
    "fe04d3c193e7c575": "5a2182f816cfc661",
    "f35e610f6c5c6fdf": "191664458ff4036b",
    "f62798655442605d": "39d2011f3dcd3498",
    "d461ec57ef42e2f0": _REDUCER_TEXT,
}
"""The same by the text of the three modules."""

_REDUCED = Pattern(f"$results = {REDUCE}($dq, $dk, G, $$how)")
_UNPACKED = Pattern("B, S, R, G, N = q.shape")
_MAPPED = Pattern("i_h_qk = i_h // (H // G)")


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
    function = plain_function(source, target.symbol)
    if function is None:
        raise unknown(source, None, f"there is a MIMO backward but no {target.symbol}")
    if calls(function, REDUCE):
        return _probe_reducer(tree, target, source, function)
    if (seen := _text(source)) != _KNOWN[target]:
        raise unknown(source, function, f"{target.symbol} is in an unknown text {seen}")
    refusal = next((each for each in ast.walk(function) if isinstance(each, ast.Raise)), function)
    return broken(ONE_OR_ALL, at(source, refusal, "sums gradients into one group or into all, else raises"))


def _text(source: ModuleSource) -> str:
    """Return the fingerprint of a module without its docstring."""
    return fingerprint([each for each in source.syntax.body if not is_docstring(each)])


# Main


def _probe_reducer(tree: SourceTree, target: Target, source: ModuleSource, function: FunctionNode) -> Finding:
    reducer = tree.module(REDUCER)
    if reducer is None:
        raise unknown(source, function, f"calls {REDUCE}, and there is no module {REDUCER}")
    if (surprise := next(_surprises(source, function), None)) is not None:
        raise unknown(source, function, f"{function.name} {surprise}")
    return judged(
        tree,
        _REPAIRED[target],
        at(source, calls(function, REDUCE)[0], f"sums gradients into any number of groups: {REDUCE}"),
        texts=_TEXTS,
        bodies=[
            *(Body(source.name, name) for name in (function.name, *FACTORIES, REDUCE)),
            *(Body(REDUCER, each.name) for each in reducer.syntax.body if isinstance(each, FunctionNode)),
        ],
    )


def _surprises(source: ModuleSource, function: FunctionNode) -> Iterator[str]:
    """Yield how a function that calls the reducer is not what main's is, as far as groups go."""
    imports = [each for each in ast.walk(source.syntax) if isinstance(each, ast.ImportFrom) and each.module == REDUCER]
    brought = [alias for each in imports for alias in each.names if (alias.name, alias.asname) == (REDUCE, None)]
    if len(brought) != 1 or source.bindings.anywhere(REDUCE) != brought:
        yield f"does not take {REDUCE} from {REDUCER} alone"
    reduced = [_REDUCED.match(each) for each in function.body if calls(each, REDUCE)]
    results = _names(reduced[0]["results"]) if len(reduced) == 1 and reduced[0] else []
    if len(results) != 4:
        yield f"does not name the four results of one {REDUCE}(dq, dk, G) among its own statements"
    else:
        returned = [_names(each.value) for each in function.body if isinstance(each, ast.Return)]
        if len(returned) != 1 or returned[0][:2] != results[:2] or returned[0][6:8] != results[2:]:
            yield "does not return what was reduced"
    if not any(map(_UNPACKED.match, function.body)) or len(binders(function, "G")) != 1:
        yield "does not take G from q alone"
    if any(isinstance(each, ast.Compare) and "G" in words(each) for each in ast.walk(function)):
        yield "compares G with something"
    for name in FACTORIES:
        factory = source.function(name)
        mapped = list(_MAPPED.find(factory)) if factory else []
        if factory is None or len(mapped) != 1 or len(binders(factory, "i_h_qk")) != 1:
            yield f"has kernels of {name} which do not map heads to groups by {_MAPPED.text}"


def _names(node: ast.AST | None) -> list[str]:
    return [each.id if isinstance(each, ast.Name) else "" for each in getattr(node, "elts", ())]
