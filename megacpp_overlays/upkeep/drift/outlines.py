"""The outline of a module's source: the names that it defines and imports, parsed without running it."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

from megacpp_overlays.loader import live_names
from megacpp_overlays.source.trees import InstalledTree, ModuleSource


class Outline:
    """The definitions and imports of a source, by qualified name."""

    def __init__(self, source: ModuleSource, package: str) -> None:
        """Parse a source.

        Args:
            source: the source of a module.
            package: the package that its relative imports start from.

        Raises:
            SourceError: the source cannot be parsed.
        """
        self.path = source.path
        self.defined: dict[str, set[int]] = {}
        """The first lines of each name's definitions; there may be several definitions in branches."""
        self.imported: set[str] = set()
        self.modules: set[str] = set()
        """Every module that is imported, at any level of the source."""
        self.changing: set[str] = set()
        """Names that functions of the module set."""
        self.runs_text = False
        """Whether the source calls `exec`: it may define functions from text, in a namespace that names no module."""
        for node, prefix in _nodes(source.syntax):
            self._add(node, prefix, package)

    def _add(self, node: ast.AST, prefix: str, package: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min(each.lineno for each in (node, *node.decorator_list))
            self.defined.setdefault(f"{prefix}{node.name}", set()).add(first)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            for name in (target.id for target in node.targets if isinstance(target, ast.Name)):
                self.defined.setdefault(f"{prefix}{name}", set())
        elif isinstance(node, ast.Call):
            self.runs_text |= isinstance(node.func, ast.Name) and node.func.id == "exec"
        elif isinstance(node, ast.Global):
            self.changing.update(node.names)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self.imported.update(f"{prefix}{alias.asname or alias.name}" for alias in node.names)
            self.modules.update(_imported(node, package))


class Outlines:
    """The outlines of loaded modules, each read once."""

    def __init__(self) -> None:
        self._known: dict[str, Outline | None] = {}

    def of(self, name: str) -> Outline | None:
        """Return the outline of a module, or None where it is not loaded or has no source.

        Raises:
            SourceError: the source cannot be read or parsed.
        """
        if name not in self._known:
            module = sys.modules.get(name)
            self._known[name] = _read(name, module) if issubclass(type(module), ModuleType) and module else None
        return self._known[name]


def _read(name: str, module: ModuleType) -> Outline | None:
    there = live_names.namespace(module)
    file = there.get("__file__")
    if not isinstance(file, str) or not file.endswith((".py", ".pyc")):
        return None  # compiled modules and namespace packages have no source
    source = InstalledTree().module(name)
    return None if source is None else Outline(source, name if "__path__" in there else name.rpartition(".")[0])


def _nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield every node with the prefix of the qualified names of definitions in it."""
    nodes: list[tuple[ast.AST, str]] = [(tree, "")]
    while nodes:
        node, prefix = nodes.pop()
        yield node, prefix
        if isinstance(node, ast.ClassDef):
            prefix += f"{node.name}."
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            prefix += f"{node.name}.<locals>."
        nodes += [(each, prefix) for each in ast.iter_child_nodes(node)]


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    try:
        return [importlib.util.resolve_name(f"{'.' * node.level}{node.module or ''}", package)]
    except ImportError:  # more dots than packages
        return []
