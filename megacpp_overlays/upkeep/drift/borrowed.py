"""Where the names come from that a module only imports."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Collection
from types import ModuleType
from typing import Any

from megacpp_overlays.loader import seams
from megacpp_overlays.upkeep.drift.bindings import Name

_ABSENT = object()


def homes(
    module: ModuleType, name: str, bound: Name, live: Any, packages: Collection[str]
) -> tuple[tuple[ModuleType, str], ...]:
    """Return the loaded modules that a name may be imported from, each with its name there; imports nothing.

    Args:
        module: the module that imports.
        name: its name there.
        bound: what the source binds to it.
        live: what it leads to now.
        packages: top-level packages to look at.

    Returns:
        Nothing where the name has another way to come by what it leads to, such as a library that is missing, a module
        that is not loaded any more or that makes its names when they are asked for, or data that changes by itself.
    """
    if bound.functions or bound.classes or bound.lambdas or bound.deleted or not bound.others:
        return ()
    found: list[tuple[ModuleType, str]] = []
    for node in bound.others:
        if isinstance(node, ast.Constant):
            if node.value is live:
                return ()
            continue
        if not isinstance(node, ast.ImportFrom):
            return ()
        for alias in (each for each in node.names if (each.asname or each.name) == name):
            home = sys.modules.get(_absolute(module, node))
            if home is None:
                continue
            names = seams.namespace(home) if issubclass(type(home), ModuleType) else {}
            if alias.name not in names or home.__name__.partition(".")[0] not in packages:
                return ()
            below = (f"{home.__name__}.{alias.name}", f"{module.__name__}.{name}")
            if any(live is sys.modules.get(each, _ABSENT) for each in below):
                return ()  # a module and a function have one name: it depends on what was imported last
            if not callable(names[alias.name]) and not callable(live):
                return ()
            found.append((home, alias.name))
    return tuple(found)


def _absolute(module: ModuleType, node: ast.ImportFrom) -> str:
    attributes = seams.namespace(module)
    name = str(attributes.get("__name__"))
    package = name if "__path__" in attributes else name.rpartition(".")[0]
    try:
        return importlib.util.resolve_name(f"{'.' * node.level}{node.module or ''}", package or None)
    except ImportError:
        return ""
