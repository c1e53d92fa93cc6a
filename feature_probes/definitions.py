"""The one definition of a function in a module, its parameters and its calls."""

from __future__ import annotations

import ast
import copy

from megacpp_overlays.errors import SourceError
from megacpp_overlays.source.trees import FunctionNode, ModuleSource


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
            case ast.alias() if {name, "*"} & {node.name, node.asname}:
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
