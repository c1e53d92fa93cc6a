"""Recording of the definitions that a probe asks for, so that they can be compared with the running process.

A probe reads text. Its finding is true of a process only while the names that it read still lead to the code in that text.
`ReadingTree` records the calls of `ModuleSource.find`, `Bindings.of` and `Bindings.definitions` by module and symbol:

    function    the line of its definition, and how many wrappers its decorators explain
    class       the class itself; its methods count where the probe asked for them by name
    import      a name that the module takes from another one with `from ... import`

Names that a module assigns, and names that are not there, are no readings: they lead to no code of their own.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from megacpp_overlays.model import Reading, ReadingKind
from megacpp_overlays.source.bindings import Bindings, Definition
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, ShippedFile, SourceTree, shipped

_DESCRIPTORS = {"staticmethod", "classmethod", "property"}


def first_line(node: Definition) -> int:
    """Return the line at which the code of a definition begins: that of its first decorator, if it has any."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def wrappers(node: FunctionNode) -> int:
    """Return the number of wrappers that the decorators of a definition explain."""
    names = (getattr(decorator, "id", None) for decorator in node.decorator_list)
    return sum(name not in _DESCRIPTORS for name in names)


class ReadingTree:
    """Source tree that records the definitions that are asked for."""

    def __init__(self, tree: SourceTree) -> None:
        self._tree = tree
        self._sources: dict[str, tuple[_RecordedSource, dict[str, None]]] = {}

    def module(self, name: str) -> ModuleSource | None:
        """Return the source of a module, which records the requested symbols."""
        if name not in self._sources:
            source = self._tree.module(name)
            if source is None:
                return None
            asked: dict[str, None] = {}
            self._sources[name] = _RecordedSource(source, asked), asked
        return self._sources[name][0]

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        """Return a file that is no module; see `trees.shipped`."""
        return shipped(self._tree, package, path)

    def readings(self) -> tuple[Reading, ...]:
        """Return the readings of all requests so far, in order."""
        return tuple(
            reading
            for _, (source, asked) in sorted(self._sources.items())
            for symbol in sorted(asked)
            for reading in _readings(source, symbol)
        )


class _RecordedSource(ModuleSource):
    """Recording source of a module; the wrapped source parses and hashes it."""

    def __init__(self, source: ModuleSource, asked: dict[str, None]) -> None:
        super().__init__(source.name, source.path, source.text)
        self.plain = source
        self._asked = asked

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the text."""
        return self.plain.sha256

    @functools.cached_property
    def syntax(self) -> ast.Module:
        """The syntax tree; see `ModuleSource.syntax`."""
        return self.plain.syntax

    @functools.cached_property
    def bindings(self) -> Bindings:
        """Bindings of the names of the module, which record the requested symbols."""
        return _RecordedBindings(self.plain.bindings, self._asked)


class _RecordedBindings(Bindings):
    """Copy of existing bindings that records the requested symbols."""

    def __init__(self, bindings: Bindings, asked: dict[str, None]) -> None:
        vars(self).update(vars(bindings))
        self._asked = asked

    def of(self, symbol: str) -> list[ast.AST]:
        """Return the nodes that bind a symbol, and record the symbol."""
        self._asked[symbol] = None
        return super().of(symbol)

    def definitions(self, symbol: str) -> list[Definition]:
        """Return the definitions of a symbol, and record the symbol."""
        self._asked[symbol] = None
        return super().definitions(symbol)


def _readings(source: _RecordedSource, symbol: str) -> Iterator[Reading]:
    bindings = source.plain.bindings
    for node in bindings.definitions(symbol):
        is_class = isinstance(node, ast.ClassDef)
        kind = ReadingKind.CLASS if is_class else ReadingKind.FUNCTION
        explained = 0 if isinstance(node, ast.ClassDef) else wrappers(node)
        yield Reading(source.name, symbol, kind, first_line(node), explained)
    if "." not in symbol and not bindings.definitions(symbol):
        yield from _imported(source, symbol)


def _imported(source: ModuleSource, symbol: str) -> Iterator[Reading]:
    """Yield the reading of a name that a statement at the module's top level imports."""
    for statement in source.syntax.body:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == symbol:
                    origin = f"{origin_of(source, statement)}:{alias.name}"
                    yield Reading(source.name, symbol, ReadingKind.IMPORT, statement.lineno, 0, origin)


def origin_of(source: ModuleSource, statement: ast.ImportFrom) -> str:
    """Return the absolute name of the module that a statement imports from."""
    if not statement.level:
        return statement.module or ""
    is_package = source.path.rpartition("/")[2].startswith("__init__.")
    parts = source.name.split(".") if is_package else source.name.split(".")[:-1]
    parents = parts[: len(parts) - (statement.level - 1)]
    return ".".join([*parents, *([statement.module] if statement.module else [])])
