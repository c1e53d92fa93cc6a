"""What the source of a module binds to each of its names, wherever in the scope it does so."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megacpp_overlays.source.trees import FunctionNode

_DESCRIPTORS = {"staticmethod", "classmethod", "property", "abstractmethod", "override", "final", "overload"}
"""Decorators that give no further function; the first three are unwrapped by type."""
_OF_PROPERTIES = {"getter", "setter", "deleter"}


@dataclass(slots=True)
class Name:
    """One name of one scope."""

    functions: list[FunctionNode] = field(default_factory=list)
    classes: list[ast.ClassDef] = field(default_factory=list)
    lambdas: list[ast.Lambda] = field(default_factory=list)
    """Of a module only: what a class makes of one is for its bases and decorators to say."""
    others: list[ast.AST] = field(default_factory=list)
    """What else is bound to it: assigned values and imports."""
    always: bool = False
    """Whether a definition of it stands outside every branch."""
    deleted: bool = False

    @property
    def decorators(self) -> list[ast.expr]:
        """The decorators of every definition that may leave a function or an object of their own."""
        nodes = (*self.functions, *self.classes)
        return [each for node in nodes for each in node.decorator_list if not _is_plain(each)]

    @property
    def wrappers(self) -> int:
        """How many wrappers the source itself puts around one definition, at most."""
        nodes = (*self.functions, *self.classes)
        return max((sum(not _is_plain(each) for each in node.decorator_list) for node in nodes), default=0)


def _is_plain(decorator: ast.expr) -> bool:
    if isinstance(decorator, ast.Attribute):
        return decorator.attr in _DESCRIPTORS | _OF_PROPERTIES
    return isinstance(decorator, ast.Name) and decorator.id in _DESCRIPTORS


def first_line(node: FunctionNode) -> int:
    """Return the line that the code object of a function says it starts at."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def merged(scopes: Sequence[Mapping[str, Name]]) -> Mapping[str, Name]:
    """Return the names of one class that is defined in several branches."""
    found: dict[str, Name] = {}
    for name in dict.fromkeys(name for each in scopes for name in each):
        parts = [each[name] for each in scopes if name in each]
        found[name] = Name(
            functions=[node for part in parts for node in part.functions],
            classes=[node for part in parts for node in part.classes],
            others=[node for part in parts for node in part.others],
            always=len(parts) == len(scopes) and all(part.always for part in parts),
            deleted=any(part.deleted for part in parts),
        )
    return found


def set_by_functions(tree: ast.Module) -> frozenset[str]:
    """Return the names of a module that its own functions bind while it runs."""
    return frozenset(name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names)


def scope(body: Sequence[ast.stmt], class_name: str | None = None) -> Mapping[str, Name]:
    """Return the names that the statements of a module or class bind.

    Args:
        body: the statements.
        class_name: of the class, whose private names Python writes differently.
    """
    found: dict[str, Name] = {}
    for statement, branch in _flat(body, branch=False):
        for name, node in _bound(statement):
            entry = found.setdefault(_mangled(name, class_name), Name())
            if isinstance(node, FunctionNode):
                entry.functions.append(node)
            elif isinstance(node, ast.ClassDef):
                entry.classes.append(node)
            elif isinstance(node, ast.Delete):
                entry.deleted = True
            elif isinstance(node, ast.Lambda) and class_name is None and isinstance(statement, ast.Assign):
                entry.lambdas.append(node)
            else:
                entry.others.append(node)
            entry.always |= not branch
    return found


def _flat(body: Sequence[ast.stmt], *, branch: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield the statements of a scope, and whether each stands in a branch."""
    for statement in body:
        yield statement, branch
        if not isinstance(statement, ast.ClassDef | FunctionNode):
            for block in _blocks(statement):
                yield from _flat(block, branch=branch or not isinstance(statement, ast.With))


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, [])
    for inner in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield inner.body


def _bound(statement: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(statement, ast.ClassDef | FunctionNode):
        yield statement.name, statement
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0], statement
    elif isinstance(statement, ast.Delete):
        yield from ((each.id, statement) for each in statement.targets if isinstance(each, ast.Name))
    else:
        value = getattr(statement, "value", None) or getattr(statement, "iter", None) or statement
        managed = [item.optional_vars for item in getattr(statement, "items", ())]
        targets = getattr(statement, "targets", None) or [getattr(statement, "target", None), *managed]
        for node in (inner for target in targets if target is not None for inner in ast.walk(target)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id, value


def _mangled(name: str, class_name: str | None) -> str:
    if class_name is None or not name.startswith("__") or name.endswith("__"):
        return name
    stripped = class_name.lstrip("_")
    return f"_{stripped}{name}" if stripped else name
