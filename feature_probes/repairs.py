"""Repairs that were read, and whether a tree has one of them: FIXED is said of these and of nothing else.

A probe keeps a table of the trees that it was read in. Each names the bodies that hold the repair and those that it goes
through on its way: the caller that passes an argument, the helper that is called, the name that a module imports. An edit
in any of them can bring the defect back with the repair in plain sight, so each is compared as a whole: a definition
with its decorators, the bases of its class, and how the module binds every name that it uses. What differs anywhere
looks repaired at best, and is UNRECOGNISED.

    _REPAIRED = {
        "0.8.5": {
            "package.module:function": "0123456789abcdef",
            "package.module:Class.method": "0123456789abcdef",
            "package.module:imported_name": "0123456789abcdef",
            "package.other:": "0123456789abcdef",  # the whole module
        },
    }
"""

from __future__ import annotations

import ast
import bisect
from collections.abc import Mapping, Sequence

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes.findings import fixed, looks_repaired
from megacpp_overlays.model import Body, Evidence, Finding
from megacpp_overlays.source.fingerprint import fingerprint, is_docstring
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, SourceTree

_Definition = ast.ClassDef | FunctionNode
Repairs = Mapping[str, Mapping[str, str]]
"""Fingerprints of bodies, `module:symbol`, by the trees in which they were read together."""


def judged(tree: SourceTree, repairs: Repairs, *seen: Evidence, bodies: Sequence[str] = ()) -> Finding:
    """Return FIXED where every body of a repair is as it was read, else that it looks repaired.

    Args:
        tree: what is asked about.
        repairs: what was read.
        seen: what made the probe look here.
        bodies: where the repair must be, for a repair that was read nowhere yet.
    """
    found: dict[str, str] = {}
    for where in dict.fromkeys([*(key for known in repairs.values() for key in known), *bodies]):
        found[where] = _meaning_in(tree, where)
    strange = list(found)
    for read_in, known in repairs.items():
        other = [where for where, body in known.items() if found[where] != body]
        if not other:
            return fixed(*seen, Evidence(seen=f"as in {read_in}"), repair=[_body(where) for where in known])
        strange = min(strange, other, key=len)
    unknown = Evidence(
        seen="not as in any tree that was read: " + ", ".join(f"{each} {found[each]}" for each in strange)
    )
    return looks_repaired(*seen, unknown, repair=[_body(where) for where in found])


def _body(where: str) -> Body:
    module, _, symbol = where.partition(":")
    return Body(module, symbol)


def _meaning_in(tree: SourceTree, where: str) -> str:
    """Return the fingerprint of a body, or in words why it has none."""
    module, _, symbol = where.partition(":")
    try:
        source = tree.module(module)
        return "is not there" if source is None else meaning(source, symbol)
    except SourceError as error:
        return f"({error})"


def meaning(source: ModuleSource, symbol: str) -> str:
    """Return the fingerprint of a definition together with what it stands in and how the names in it are bound.

    Of a name that the module imports, it is the one of the statements that bind it; of an empty one, that of the module.

    Raises:
        SourceError: there is no such name, or more than one thing binds it.
    """
    if not symbol:
        return fingerprint([each for each in source.syntax.body if not is_docstring(each)])
    path = symbol.split(".")
    if len(path) == 1 and source.bindings.of(symbol) and not source.bindings.definitions(symbol):
        return fingerprint(_bound(source, symbol))
    scopes = [_standing(source, ".".join(path[:depth])) for depth in range(1, len(path) + 1)]
    parts: list[object] = [
        [each.decorator_list, getattr(each, "bases", []), getattr(each, "keywords", [])] for each in scopes[:-1]
    ]
    node = scopes[-1]
    names = {each.id for part in (*_heads(scopes[:-1]), node) for each in ast.walk(part) if isinstance(each, ast.Name)}
    return fingerprint(
        [*parts, node, *([name, _bound(source, name)] for name in sorted(names) if source.bindings.of(name))]
    )


def _heads(classes: Sequence[_Definition]) -> list[ast.expr]:
    """Return what stands around a method: the decorators and bases of its class."""
    return [node for each in classes for node in (*each.decorator_list, *getattr(each, "bases", ()))]


def _standing(source: ModuleSource, symbol: str) -> _Definition:
    """Return the one definition of a name, at its place: not below a condition, and bound by nothing else."""
    owner, _, name = symbol.rpartition(".")
    scope: Sequence[ast.stmt] = _standing(source, owner).body if owner else source.syntax.body
    bindings = source.bindings.of(symbol)
    if not bindings:
        raise SourceError(f"there is no {symbol}", file=source.path)
    found = bindings[0]
    if len(bindings) > 1 or not isinstance(found, _Definition) or found not in scope:
        line = getattr(bindings[-1], "lineno", None)
        raise SourceError(f"{name} is no plain definition that stands alone", file=source.path, line=line)
    return found


def _bound(source: ModuleSource, name: str) -> list[object]:
    """Return what binds a name of the module: a definition by its name, anything else as the statement around it."""
    body = source.syntax.body
    starts = [_place(each) for each in body]
    found: list[object] = []
    for node in source.bindings.of(name):
        statement = body[max(bisect.bisect_right(starts, _place(node)) - 1, 0)]
        entry: object = (
            [type(node).__name__, name] if isinstance(node, _Definition) and node is statement else statement
        )
        if entry not in found:
            found.append(entry)
    return found


def _place(node: ast.AST) -> tuple[int, int]:
    """Return where a node begins, its decorators included."""
    first = min([node, *getattr(node, "decorator_list", ())], key=lambda each: getattr(each, "lineno", 0))
    return getattr(first, "lineno", 0), 0 if first is not node else getattr(first, "col_offset", 0)
