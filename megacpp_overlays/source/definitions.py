"""Queries on syntax: the one definition of a function or class in a module, and the words, calls and bound names in code."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import TypeVar

from megacpp_overlays.errors import SourceError
from megacpp_overlays.source.fingerprint import is_docstring
from megacpp_overlays.source.trees import FunctionNode, ModuleSource

_Kind = TypeVar("_Kind", ast.FunctionDef, ast.ClassDef)


def plain_function(source: ModuleSource, symbol: str) -> ast.FunctionDef | None:
    """Return the one undecorated definition of a function or method, and None where the name is not bound.

    Raises:
        SourceError: the name is bound, but not by exactly one plain `def` at its place; or a hook of the module may provide it.
    """
    scope: list[ast.stmt] = source.syntax.body
    if "." in symbol:
        if (cls := plain_class(source, symbol.partition(".")[0])) is None:
            return None
        scope = cls.body
    return _plain(source, symbol, scope, ast.FunctionDef)


def plain_class(source: ModuleSource, symbol: str) -> ast.ClassDef | None:
    """Return the one undecorated definition of a class, and None where the name is not bound.

    Raises:
        SourceError: the name is bound, but not by exactly one plain `class` at its place; or a hook of the module may provide it.
    """
    return _plain(source, symbol, source.syntax.body, ast.ClassDef)


def _plain(source: ModuleSource, symbol: str, scope: list[ast.stmt], kind: type[_Kind]) -> _Kind | None:
    bindings = source.bindings.of(symbol)
    if not bindings:
        source.check_missing(symbol)
        return None
    found, line = bindings[-1], getattr(bindings[-1], "lineno", None)
    if len(bindings) > 1 or not isinstance(found, kind) or found not in scope:
        name = symbol.rpartition(".")[2]
        raise SourceError(
            f"{source.path}:{line}: {name} is bound more than once, below a condition, or by no definition"
        )
    if found.decorator_list:
        raise SourceError(f"{source.path}:{line}: {symbol} is decorated")
    return found


def statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a body without its docstring."""
    return body[1:] if is_docstring(body[0]) else body


def words(node: ast.AST) -> set[str]:
    """Return every word of a piece of code: names, attributes, parameters, arguments, imports and definitions."""
    found = (getattr(each, kind, None) for each in ast.walk(node) for kind in ("id", "attr", "arg", "name"))
    return {word for word in found if isinstance(word, str)}


def calls(node: ast.AST, name: str | None = None) -> list[ast.Call]:
    """Return the calls below a node, all of them or those of one name."""
    return [each for each in ast.walk(node) if isinstance(each, ast.Call) and name in {None, called(each)}]


def ways_out(function: FunctionNode) -> Iterator[ast.AST]:
    """Yield the `return` and `yield` nodes of a function, without those of functions inside of it."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom):
            yield node
        if not isinstance(node, ast.ClassDef | FunctionNode | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def called(call: ast.Call) -> str:
    """Return the last part of the name that is called; empty where it has none."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def binders(syntax: ast.AST | Sequence[ast.AST], name: str) -> list[ast.AST]:
    """Return the nodes that bind a name below one node or several, in any scope."""
    nodes = [syntax] if isinstance(syntax, ast.AST) else syntax
    found = [each for node in nodes for each in ast.walk(node) if name in _bound(each)]
    return sorted(found, key=lambda each: (getattr(each, "lineno", 0), getattr(each, "col_offset", 0)))


def _bound(node: ast.AST) -> tuple[str | None, ...]:
    match node:
        case ast.Name(id=name):
            return () if isinstance(node.ctx, ast.Load) else (name,)
        case ast.alias(name=name, asname=given):
            return (given or name.partition(".")[0],)
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            return tuple(names)
        case ast.arg(arg=name) | ast.MatchMapping(rest=name):
            return (name,)
    return (getattr(node, "name", None),)


def imported_names(syntax: ast.Module) -> Iterator[str]:
    """Yield every name that a module imports, also inside functions; for `from a import b` both `a` and `a.b`."""
    for node in ast.walk(syntax):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
