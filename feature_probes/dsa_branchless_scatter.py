"""Branch on sentinels in the scatter of top-k indices into the DSA index mask.

Negative indices are sentinels. Spring 2026 trees look for them with `any()` on the host, which raises while a CUDA
graph is captured: `dsa._scatter_topk_into_index_mask` in force-pushed states of PR 3674 and forks of them, then
`dsa_masking.scatter_topk_into_index_mask` at the head of that pull request and on main from 2026-06-25 to 2026-07-08.
Since d1cab16a01 it is one `scatter_reduce_`. No release up to 0.19.2 has the branch.

The replacement stands for the whole function, and the witness compares what it writes, so the branch is recognised by
its parts. The repair is recognised by fingerprint: a name does not show whether a value is read.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence

from megacpp_overlays.feature_probes.definitions import called, calls, plain_function
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import judged, table
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.patterns import Pattern
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, SourceTree

_VARIANT = "megatron.core.transformer.experimental_attention_variant"
DSA = Target(distribution="megatron-core", module=f"{_VARIANT}.dsa", symbol="_scatter_topk_into_index_mask")
MASKING = Target(distribution="megatron-core", module=f"{_VARIANT}.dsa_masking", symbol="scatter_topk_into_index_mask")

BRANCHY = "branch-on-sentinels"

_PARAMETERS = "index_mask, topk_indices, *, seq_chunk_size=256"
_SCATTER = Pattern(f"def $_({_PARAMETERS}): $$_")
_BRANCHY = Counter(
    {"call any": 2, "call where": 1, "call to": 1, "call scatter_": 1}
    | {"call max": 1, "call int": 1, "call range": 1, "call min": 1}
    | {"compare Lt": 1, "compare GtE": 1, "compare Eq": 2, "compare NotEq": 2}
    | {"operator Add": 2, "operator Or": 1, "operator USub": 1}
    | {"number 0": 3, "number 0.0": 2, "number 1": 2, "number 2": 1, "number 3": 1}
    | {"Assert": 2, "Assign": 11, "Expr": 1, "For": 1, "If": 3}
)
"""What the branchy function is made of, whatever its names and the order of its lines."""

# Fingerprints of the branchy bodies that were read: 86dd80a3a382ef8c in PR 3674 and main of 2026-06-25, and our
# stand-ins 34d8269cb55ed7a1 (spring) and 1cd2ed1e1f88dee7 (June).
_REPAIRED_BODY = "ad733f7b78721b12"
"""Fingerprint of the body that reads nothing from the host."""
_REPAIRED = {
    "0.19.0 to 0.19.2, main since d1cab16a01 (2026-07-08), dev since 6888385fc7 (2026-07-28)": "dafca31df15acaf1"
}
"""The same with the names that it uses, which mean in all of them the same."""

_WRITES = (Pattern("$_[$_] = $_"), Pattern("$_.scatter_($$_)"))
_ZEROS = (Pattern("index_mask[$_] = 0.0"), Pattern("index_mask[$_].scatter_(-1, $_, 0.0)"))


def probe_dsa(tree: SourceTree) -> Finding:
    """Return whether the scatter of a single-file DSA reads from the host."""
    return _probe(tree, DSA)


def probe_masking(tree: SourceTree) -> Finding:
    """Return whether the scatter of a DSA with a masking module reads from the host.

    Source: https://github.com/NVIDIA/Megatron-LM/pull/5099
    """
    return _probe(tree, MASKING)


def _probe(tree: SourceTree, target: Target) -> Finding:
    source = tree.module(target.module)
    if source is None:
        return absent(f"there is no module {target.module}")
    function = plain_function(source, target.symbol)
    if function is None:
        return absent(f"{target.module} has no {target.symbol}")
    if _SCATTER.match(function) is None:
        raise unknown(source, function, f"its parameters are not ({_PARAMETERS})")
    if Counter(_parts(function)) == _BRANCHY:
        return _branchy(source, function)
    if (body := fingerprint(function)) == _REPAIRED_BODY:
        repaired = table((f"{target.module}:{target.symbol}",), _REPAIRED)
        return judged(tree, repaired, at(source, function, "one write and nothing read back"))
    raise unknown(source, function, f"{function.name} has an unknown body {body}")


def _branchy(source: ModuleSource, function: FunctionNode) -> Finding:
    """Return BROKEN if the branches and the writes are where they are known, and every name is bound."""
    branches = [node for node in ast.walk(function) if isinstance(node, ast.If) and calls(node.test, "any")]
    outer = [node for node in branches if any(isinstance(each, ast.Lt) for each in ast.walk(node.test))]
    if len(branches) != 2 or len(outer) != 1:
        raise unknown(source, function, f"{function.name} branches in a way that is not known")
    for write in (found.node for pattern in _WRITES for found in pattern.find(function)):
        if not any(zero.match(write) for zero in _ZEROS):
            raise unknown(source, write, f"writes {ast.unparse(write)}")
    for name in _unbound(function):
        raise unknown(source, function, f"uses {name}, which it does not bind")
    return broken(BRANCHY, *(at(source, node, f"the host waits for {ast.unparse(node.test)}") for node in branches))


def _parts(function: FunctionNode) -> Iterator[str]:
    """Yield what a body is made of. Statements that it should not have are named, so that they count."""
    docstring = ast.get_docstring(function, clean=False) is not None
    for statement in function.body[docstring:]:
        for node in ast.walk(statement):
            match node:
                case ast.Call():
                    yield f"call {called(node)}"
                case ast.Compare(ops=operators):
                    yield from (f"compare {type(operator).__name__}" for operator in operators)
                case ast.BinOp(op=operator) | ast.UnaryOp(op=operator) | ast.BoolOp(op=operator):
                    yield f"operator {type(operator).__name__}"
                case ast.Constant(value=value) if not isinstance(value, str):
                    yield f"number {value!r}"
                case ast.stmt() | ast.IfExp() | ast.Lambda() | ast.NamedExpr() | ast.comprehension() | ast.Await():
                    yield type(node).__name__


def _unbound(function: FunctionNode) -> Iterator[str]:
    """Yield names that are read where nothing may have bound them yet: no parameter, nothing before, and not known."""
    bound = {"torch", "max", "min", "int", "range"}
    bound |= {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    yield from _read_unbound(function.body, bound)


def _read_unbound(body: Sequence[ast.stmt], bound: set[str]) -> Iterator[str]:
    """Yield names that statements read and that are not bound yet; add what these bind whichever way they go."""
    for statement in body:
        match statement:
            case ast.If(test=head, body=inner, orelse=other):
                yield from _names(head, ast.Load) - bound
                one, two = set(bound), set(bound)
                yield from _read_unbound(inner, one)
                yield from _read_unbound(other, two)
                bound |= one & two
            case ast.For(target=target, iter=head, body=inner, orelse=other):
                yield from _names(head, ast.Load) - bound
                yield from _read_unbound(inner, bound | _names(target, ast.Store))
                yield from _read_unbound(other, bound)
            case _:
                yield from _names(statement, ast.Load) - bound
                bound |= _names(statement, ast.Store)


def _names(node: ast.AST, use: type[ast.expr_context]) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, use)}
