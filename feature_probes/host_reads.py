"""What the syntax of a function says about reading device values from the host.

Shared by the probes of the CUDA-graph overlays. A call that reads needs the value on the host before the next line
runs; while a stream is captured it raises.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from megacpp_overlays.errors import SourceError
from megacpp_overlays.model import Evidence, Finding, Verdict
from megacpp_overlays.source import FunctionNode, ModuleSource

READS = frozenset(
    {"all", "allclose", "any", "bool", "cpu", "equal", "is_nonzero", "item", "masked_select", "nonzero", "numpy"}
    | {"tensor", "tolist", "unique"}
)
"""Names of calls that read, or may: `all` and `any` do where an `if` asks them, `tensor` copies from the host."""


def plain_function(source: ModuleSource, symbol: str) -> FunctionNode | None:
    """Return the one undecorated definition of a function or method, and None where the name means nothing.

    Raises:
        SourceError: the name is bound, but not by exactly one plain `def` at its place.
    """
    *owner, name = symbol.split(".")
    scope: list[ast.stmt] = source.syntax.body
    if owner:
        (class_name,) = owner
        cls = _bound_once(source, scope, class_name, ast.ClassDef)
        if not isinstance(cls, ast.ClassDef):
            return None
        if cls.decorator_list:
            raise SourceError(f"{source.path}:{cls.lineno}: {class_name} is decorated")
        scope = cls.body
    found = _bound_once(source, scope, name, ast.FunctionDef)
    if not isinstance(found, ast.FunctionDef):
        return None
    if found.decorator_list:
        raise SourceError(f"{source.path}:{found.lineno}: {symbol} is decorated")
    return found


def _bound_once(source: ModuleSource, scope: list[ast.stmt], name: str, kind: type[ast.stmt]) -> ast.stmt | None:
    """Return the statement that binds a name in a scope, if it is of a kind and nothing else does."""
    binders = [statement for statement in scope if _binds(statement, name)]
    binders += [node for node in ast.walk(source.syntax) if isinstance(node, ast.Global) and name in node.names]
    if not binders:
        return None
    if len(binders) > 1 or not isinstance(binders[0], kind):
        raise SourceError(f"{source.path}:{binders[-1].lineno}: {name} is no plain definition that stands alone")
    return binders[0]


def _binds(statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return statement.name == name
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=used) | ast.Attribute(attr=used) if used == name and not isinstance(node.ctx, ast.Load):
                return True
            case ast.alias() if name in {node.name, node.asname}:
                return True
            case ast.FunctionDef(name=used) | ast.AsyncFunctionDef(name=used) | ast.ClassDef(name=used) if used == name:
                return True
            case ast.Call(func=ast.Name(id="setattr"), args=[_, ast.Constant(value=used), *_]) if used == name:
                return True
    return False


def signature(function: FunctionNode) -> str:
    """Return the parameters of a function with their defaults, without annotations."""
    arguments = copy.deepcopy(function.args)
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(arguments)


def calls(node: ast.AST, name: str | None = None) -> list[ast.Call]:
    """Return the calls below a node, all of them or those of one name."""
    return [each for each in ast.walk(node) if isinstance(each, ast.Call) and name in {None, called(each)}]


def called(call: ast.Call) -> str:
    """Return the last part of the name that is called; empty where it has none."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def reads(function: FunctionNode) -> Iterator[ast.Call]:
    """Yield the calls in a function that read from the host, or may."""
    return (call for call in calls(function) if called(call) in READS)


def at(source: ModuleSource, node: ast.AST, seen: str) -> Evidence:
    """Return evidence with the place of a node."""
    return Evidence(seen=seen, file=source.path, line=getattr(node, "lineno", None))


def broken(shape: str, *seen: Evidence) -> Finding:
    """Return the finding of a recognised shape."""
    return Finding(verdict=Verdict.BROKEN, shape=shape, evidence=seen)


def fixed(*seen: Evidence) -> Finding:
    """Return the finding of upstream's own repair."""
    return Finding(verdict=Verdict.FIXED, shape=None, evidence=seen)


def absent(seen: str) -> Finding:
    """Return the finding where there is nothing to repair."""
    return Finding(verdict=Verdict.ABSENT, shape=None, evidence=(Evidence(seen=seen),))


def unrecognised(*seen: Evidence) -> Finding:
    """Return the finding that installs nothing."""
    return Finding(verdict=Verdict.UNRECOGNISED, shape=None, evidence=seen)
