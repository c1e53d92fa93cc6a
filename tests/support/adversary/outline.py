"""Outline of a text, name by name, made without the helpers of probes: the difference between a module and its mutant.

It is kept apart from `source.bindings` and `source.fingerprint` on purpose: a check that uses the code it checks finds nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | Function
LOOSE = "<module>"
"""Statements of a module that bind no name."""
EVERYTHING = "*"


class Outline:
    """The definitions of a text: functions, methods, heads of classes, and all other bindings of names in a module or class."""

    def __init__(self, text: str, syntax: ast.Module | None = None) -> None:
        self.syntax = ast.parse(text) if syntax is None else syntax
        self.parts: dict[str, list[ast.AST | list[ast.AST]]] = {}
        self.definitions: dict[str, Definition] = {}
        self.of_node: dict[int, tuple[str, ...]] = {}
        self._lines = text.split("\n")
        self._read(self.syntax.body, "")

    def _read(self, body: list[ast.stmt], owner: str) -> None:
        for node in body:
            if isinstance(node, Definition):
                symbols: tuple[str, ...] = (f"{owner}{node.name}",)
                self.definitions[symbols[0]] = node
            else:
                symbols = tuple(_in_scope(name, owner) for name in _bound(node)) or (owner[:-1] or LOOSE,)
            self.of_node[id(node)] = symbols
            if is_text(node):
                continue
            if isinstance(node, ast.ClassDef):
                self._add(symbols[0], [*node.decorator_list, *node.bases, *node.keywords])
                self._read(node.body, f"{symbols[0]}.")
            else:
                for symbol in symbols:
                    self._add(symbol, node)

    def _add(self, symbol: str, part: ast.AST | list[ast.AST]) -> None:
        self.parts.setdefault(symbol, []).append(part)

    def said(self, symbol: str) -> tuple[str, ...]:
        """Return the code of the definitions of a name, without comments, layout and docstrings."""
        return tuple(_dump(part) for part in self.parts.get(symbol, ()))

    def changed(self, other: Outline) -> frozenset[str]:
        """Return the names that mean something else in another text."""
        both = self.parts.keys() & other.parts.keys()
        return (self.parts.keys() ^ other.parts.keys()) | frozenset(
            name for name in both if self._text(name) != other._text(name) and self.said(name) != other.said(name)
        )

    def _text(self, symbol: str) -> list[str]:
        """Return the lines of the definitions of a name: quick to compare where nothing differs."""
        found = []
        for part in self.parts.get(symbol, ()):
            for node in part if isinstance(part, list) else [part]:
                first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])  # type: ignore[attr-defined]
                found += [type(node).__name__, *self._lines[first - 1 : node.end_lineno]]  # type: ignore[attr-defined]
        return found

    def within(self, symbol: str) -> list[str]:
        """Return a name and the members of it, where it is a class."""
        return [name for name in self.parts if name == symbol or name.startswith(f"{symbol}.")]


def hits(changed: frozenset[str], symbol: str) -> bool:
    """Return whether a change of these names changes the meaning of a symbol: of itself, its class, or its members."""
    if EVERYTHING in changed or (not symbol and changed):
        return True
    return any(
        name == symbol or name.startswith(f"{symbol}.") or (symbol.startswith(f"{name}.") and "." not in name)
        for name in changed
    )


def is_text(node: ast.AST) -> bool:
    """Return whether a statement is nothing but a text, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _in_scope(name: str, owner: str) -> str:
    return name if "." in name else f"{owner}{name}"


def _dump(part: ast.AST | list[ast.AST]) -> str:
    if isinstance(part, list):
        return "|".join(_dump(each) for each in part)
    bodies = [(node, node.body) for node in ast.walk(part) if isinstance(node, Definition)]
    try:
        for node, body in bodies:
            if body and is_text(body[0]):
                node.body = body[1:]
        return ast.dump(part)
    finally:
        for node, body in bodies:
            node.body = body


def _bound(statement: ast.stmt) -> list[str]:
    """Return the names that a statement binds in its scope, and attributes of names, such as `Layer.forward`."""
    return list(dict.fromkeys(name for node in _same_scope(statement) for name in _names(node)))


def _same_scope(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, Definition | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _same_scope(child)


def _names(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            return [name]
        case ast.Attribute(ctx=ast.Store() | ast.Del()):
            text = ast.unparse(node)
            return [text] if text.replace(".", "").isidentifier() else []
        case ast.alias(name=name, asname=given):
            return [given or name.partition(".")[0]] if name != "*" else [LOOSE]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return [name]
    return []
