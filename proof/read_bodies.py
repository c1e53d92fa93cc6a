"""Findings that depend on a function: a probe is asked again of a source tree without the body of that function."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from megacpp_overlays.errors import OverlayError
from megacpp_overlays.loader.probing import examine
from megacpp_overlays.model import Erratum, Verdict
from megacpp_overlays.source.trees import ModuleSource, ShippedFile, SourceTree, shipped

BODY = "raise NotImplementedError"
_DECIDED = frozenset({Verdict.BROKEN, Verdict.FIXED})


class TreeWithoutBody:
    """A source tree in which one function, or every method of one class, does nothing but raise."""

    def __init__(self, tree: SourceTree, module: str, symbol: str) -> None:
        self.tree = tree
        self.name = module
        self.symbol = symbol
        self.asked = False
        """Whether the changed module was asked for."""

    def module(self, name: str) -> ModuleSource | None:
        """Return the source of a module, changed if it is that one."""
        source = self.tree.module(name)
        if source is None or name != self.name:
            return source
        self.asked = True
        return ModuleSource(name, source.path, without_body(source, self.symbol))

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        """Return a file of a package."""
        return shipped(self.tree, package, path)


def without_body(source: ModuleSource, symbol: str) -> str:
    """Return the text of a module in which the body of a definition raises; the text as it is where there is no such one."""
    try:
        node = source.find(symbol)
    except OverlayError:  # bound more than once, or by an import
        return source.text
    lines = source.text.splitlines(keepends=True)
    for each in sorted(_functions(node), key=lambda function: -function.lineno):
        first, last = each.body[0], each.body[-1]
        indent = " " * (first.col_offset if first.lineno > each.lineno else each.col_offset + 4)
        head = [] if first.lineno > each.lineno else [f"{lines[first.lineno - 1][: first.col_offset].rstrip()}\n"]
        lines[first.lineno - 1 : last.end_lineno] = [*head, f"{indent}{BODY}\n"]
    return "".join(lines)


def _functions(node: ast.AST | None) -> Iterable[ast.FunctionDef | ast.AsyncFunctionDef]:
    if isinstance(node, ast.ClassDef):
        return [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [node] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else []


def readers(errata: Iterable[Erratum], tree: SourceTree, module: str, symbol: str) -> list[tuple[str, str]]:
    """Return the parts of overlays whose finding in a tree is another one without the body of a function.

    A part is an id and a target module. Only findings that install or retire something count: BROKEN and FIXED.
    """
    found = []
    for erratum in errata:
        changed = TreeWithoutBody(tree, module, symbol)
        without = examine(erratum, changed)
        if changed.asked:
            asked = examine(erratum, tree)
            if asked.verdict in _DECIDED and (asked.verdict, asked.shape) != (without.verdict, without.shape):
                found.append((erratum.id, erratum.target.module))
    return found
