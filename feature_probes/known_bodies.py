"""Functions, and methods of a class, that must be ones that were read before.

For a method that a seam only surrounds, but whose inner order the seam relies on, a structural reason is not enough:
an edit anywhere in it may matter. So its fingerprint must be known, and nothing else may replace it.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence

from megacpp_overlays.feature_probes.definitions import plain_class, plain_function
from megacpp_overlays.feature_probes.findings import at, unknown
from megacpp_overlays.model import Evidence
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import FunctionNode, ModuleSource


def plain_subclass(source: ModuleSource, name: str, base: str) -> ast.ClassDef:
    """Return the one undecorated class of that name, at the top level and with that base alone.

    Raises:
        SourceError: there is none, or something else binds its name or sets an attribute of it.
    """
    found = plain_class(source, name)
    if found is None:
        raise unknown(source, None, f"{name} is no plain class of this module")
    if [ast.unparse(each) for each in found.bases] != [base] or found.keywords:
        raise unknown(source, found, f"{name} has other bases than {base}")
    for change in (*source.bindings.changes(name), *source.bindings.of(f"{name}.__getattribute__")):
        raise unknown(source, change, f"{name} is changed outside its class")
    return found


def changed_method(source: ModuleSource, class_name: str, known: Mapping[str, Collection[str]]) -> Evidence | None:
    """Return evidence of the first method that is missing or has an unknown body, or None.

    Raises:
        SourceError: a method is bound more than once.
    """
    for name, bodies in known.items():
        method = source.function(f"{class_name}.{name}")
        if method is None or method not in getattr(source.find(class_name), "body", ()):  # below a condition
            return Evidence(seen=f"{class_name} has no method {name}", file=source.path)
        if (seen := fingerprint(method)) not in bodies:
            return at(source, method, f"{class_name}.{name} has an unknown body {seen}")
    return None


def known_function(source: ModuleSource, name: str, bodies: Collection[str]) -> FunctionNode:
    """Return a function that has a known body.

    Raises:
        SourceError: it is missing, has another body, or is not bound by exactly one plain `def`.
    """
    function = plain_function(source, name)
    if function is None:
        raise unknown(source, None, f"{source.name} has no {name}")
    if (seen := fingerprint(function)) not in bodies:
        raise unknown(source, function, f"{name} has an unknown body {seen}")
    return function


def check_known(source: ModuleSource, symbol: str, bodies: Collection[str]) -> None:
    """Check that a function, a method or a whole class is one that was read.

    Raises:
        SourceError: it is missing, is another one, or is changed from outside.
    """
    node = source.find(symbol)
    if node is None:
        raise unknown(source, None, f"{source.name} has no {symbol}")
    _check_unconditional(source, symbol, node)
    if (seen := fingerprint(node)) not in bodies:
        raise unknown(source, node, f"{symbol} has an unknown body {seen}")
    for change in source.bindings.changes(symbol) if "." not in symbol else ():
        raise unknown(source, change, f"{symbol} is changed outside its definition")
    inside = {id(each) for each in ast.walk(node)}
    members = node.body if isinstance(node, ast.ClassDef) else []
    for name in [each.name for each in members if isinstance(each, FunctionNode)]:
        for change in source.bindings.of(f"{symbol}.{name}"):
            if id(change) not in inside:
                raise unknown(source, change, f"{symbol}.{name} may be replaced outside its definition")


def _check_unconditional(source: ModuleSource, symbol: str, node: ast.stmt) -> None:
    """Check that a name has no other value than its definition, whatever runs.

    A function of a module may be defined in the body of a `try`, as upstreams do after an optional import. It is known
    to be bound only once, so an exception on the way leaves the name without a value and never with another one. A
    method that is not bound may be inherited instead, and the name of a module may come from its `__getattr__`.

    Raises:
        SourceError: it is defined below a condition, or in a `try` and something else may be found in its place.
    """
    owner = source.find(symbol.rpartition(".")[0]) if "." in symbol else source.syntax
    if node in getattr(owner, "body", ()):
        return
    if owner is not source.syntax or node not in _tried(source.syntax.body):
        raise unknown(source, node, f"{symbol} is defined under a condition")
    if others := source.bindings.of("__getattr__"):
        raise unknown(source, others[0], f"{symbol} is defined in a try, and this may be found in its place")


def _tried(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements in the bodies of `try` statements, and not in handlers, `else` or `finally`."""
    for statement in body:
        if isinstance(statement, ast.Try):
            yield from statement.body
            yield from _tried(statement.body)


def check_imported(source: ModuleSource, names: Collection[str], *spellings: str) -> None:
    """Check that names of a module are imported, once, and nothing else.

    Args:
        source: the module.
        names: imported under their own names.
        spellings: from where, as the import has it: `package.helpers`, or `.helpers`.

    Raises:
        SourceError: one may be something else.
    """
    brought = {
        id(alias): alias.name
        for each in source.syntax.body
        if isinstance(each, ast.ImportFrom) and "." * each.level + (each.module or "") in spellings
        for alias in each.names
    }
    for name in names:
        bound = source.bindings.of(name)
        if [brought.get(id(each)) for each in bound] != [name] or source.bindings.changes(name):
            raise unknown(source, bound[0] if bound else None, f"{name} is not the one of {spellings[0]}")
