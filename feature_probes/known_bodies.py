"""Tell whether functions, or the methods of a class, are ones that were read before.

For a method that a seam only surrounds, but whose inner order the seam relies on, a structural reason is not enough:
an edit anywhere in it may matter. So its fingerprint must be known, and nothing else may replace it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes.definitions import plain_function
from megacpp_overlays.model import Evidence
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import FunctionNode, ModuleSource


def methods(source: ModuleSource, class_name: str) -> dict[str, FunctionNode]:
    """Return the methods of the one plain class of that name.

    Raises:
        SourceError: it is defined twice, not at the top level, decorated, or touched from outside; or a method is
            defined twice.
    """
    found = source.find(class_name)
    if not isinstance(found, ast.ClassDef) or found not in source.syntax.body or found.decorator_list or found.keywords:
        raise SourceError(f"{source.path}: {class_name} is no plain class of this module")
    if [ast.unparse(base) for base in found.bases] != ["MixedPrecisionOptimizer"]:
        raise SourceError(f"{source.path}:{found.lineno}: {class_name} has other bases than MixedPrecisionOptimizer")
    for statement in source.syntax.body:
        if statement is not found and _rebinds(statement, class_name):
            raise SourceError(f"{source.path}:{statement.lineno}: {class_name} is changed outside its class")
    result: dict[str, FunctionNode] = {}
    for node in found.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name in result:
                raise SourceError(f"{source.path}:{node.lineno}: {class_name}.{node.name} is defined twice")
            result[node.name] = node
    for node in found.body:
        for name in result:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _rebinds(node, name):
                raise SourceError(f"{source.path}:{node.lineno}: {class_name}.{name} is bound twice")
    return result


def _rebinds(statement: ast.stmt, name: str) -> bool:
    """Return whether a statement outside functions binds a name, or sets an attribute of what it names."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return statement.name == name
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=used) if used == name and not isinstance(node.ctx, ast.Load):
                return True
            case ast.Attribute(value=ast.Name(id=used)) if used == name and not isinstance(node.ctx, ast.Load):
                return True
            case ast.Call(func=ast.Name(id="setattr"), args=[ast.Name(id=used), *_]) if used == name:
                return True
            case ast.alias() if name in {node.name, node.asname}:
                return True
            case ast.FunctionDef(name=used) | ast.ClassDef(name=used) if used == name:
                return True
    return False


def unknown(source: ModuleSource, class_name: str, known: Mapping[str, frozenset[str]]) -> Evidence | None:
    """Return evidence of the first method that is missing or has an unknown body, or None.

    Raises:
        SourceError: see `methods`.
    """
    found = methods(source, class_name)
    for name, bodies in known.items():
        if name not in found:
            return Evidence(seen=f"{class_name} has no method {name}", file=source.path)
        if (seen := fingerprint(found[name])) not in bodies:
            line = found[name].lineno
            return Evidence(seen=f"{class_name}.{name} has an unknown body {seen}", file=source.path, line=line)
    return None


def unfamiliar(source: ModuleSource, known: Mapping[str, str]) -> Evidence | None:
    """Return evidence of the first function that is missing or whose fingerprint is not the known one, or None.

    Raises:
        SourceError: a name is bound, but not by exactly one plain `def`.
    """
    for name, body in known.items():
        function = plain_function(source, name)
        if function is None:
            return Evidence(seen=f"{source.name} has no {name}", file=source.path)
        if (seen := fingerprint(function)) != body:
            return Evidence(seen=f"{name} has an unknown body {seen}", file=source.path, line=function.lineno)
    return None
