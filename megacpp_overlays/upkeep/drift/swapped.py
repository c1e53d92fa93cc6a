"""Whether what stands in `sys.modules` is the module that Python would load from the source there."""

from __future__ import annotations

import ast
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from megacpp_overlays.source import trees
from megacpp_overlays.upkeep.drift import definers


def by(name: str, loaded: object) -> str | None:
    """Return who took the place of a whole module, or None where nobody did.

    What has no Python source, such as a compiled module or a namespace, is nobody's, and so is what the source of a
    module itself puts in its place. Imports nothing, and wakes no lazy module.
    """
    path = _source(name)
    if path is None:
        return None
    attributes = _attributes(loaded)
    file = attributes.get("__file__")
    if isinstance(file, str) and (same_file(file, path) or _was_imported(name, attributes, file)):
        return None
    if _swaps_itself(path):
        return None
    if issubclass(type(loaded), ModuleType):
        return f"the module {attributes.get('__name__')} ({file or 'of no file'})"
    return "None: its import fails" if loaded is None else definers.describe(loaded)


def same_file(one: str, other: str) -> bool:
    """Return whether two paths lead to one file."""
    try:
        return one == other or os.path.samefile(one, other)
    except OSError:
        return False


def _attributes(loaded: object) -> dict[str, Any]:
    try:
        found: dict[str, Any] = object.__getattribute__(loaded, "__dict__")
    except AttributeError:
        return {}
    return found


def _source(name: str) -> str | None:
    """Return the Python file that a module would be loaded from."""
    parent = name.rpartition(".")[0]
    if not parent:
        spec = trees.find_spec(name, None, None)
    else:
        folders = _attributes(sys.modules.get(parent)).get("__path__")
        spec = PathFinder.find_spec(name, list(folders)) if folders is not None else None
    origin = spec.origin if spec is not None and spec.has_location else None
    return origin if origin is not None and origin.endswith(".py") else None


def _was_imported(name: str, attributes: dict[str, Any], file: str) -> bool:
    """Return whether a top-level module was found under its name while the path was another one."""
    spec = attributes.get("__spec__")
    return "." not in name and isinstance(spec, ModuleSpec) and spec.name == name and spec.origin == file


def _swaps_itself(path: str) -> bool:
    """Return whether the source of a module assigns to `sys.modules`."""
    try:
        tree = ast.parse(Path(path).read_bytes(), filename=path)
    except (OSError, SyntaxError, ValueError):
        return False
    return any(
        isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "sys.modules"
        for node in ast.walk(tree)
    )
