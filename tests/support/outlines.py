"""Outlines of modules: the names that two of them define, and the differences that matter to a probe or a caller."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megacpp_overlays.loader.probing import examine
from megacpp_overlays.loader.witnesses import RecordingTree
from megacpp_overlays.model import Erratum, Finding, Verdict
from megacpp_overlays.source.trees import FunctionNode, SourceTree

_Definition = ast.ClassDef | FunctionNode


class _Outline(NamedTuple):
    """The compared parts of a definition; its body is not compared."""

    kind: str
    place: tuple[str, ...]
    """The statements around it, from its class or module inwards: `try` and the like."""
    decorators: tuple[str, ...]
    takes: str
    """Parameters with their defaults, or base classes."""


def imitated(errata: Sequence[Erratum], stand_in: SourceTree, tree: SourceTree) -> list[str]:
    """Return the modules of a stand-in that probes read which recognise the same in it as in another tree."""
    modules = dict[str, None]()
    for each in errata:
        asked = RecordingTree(stand_in)
        found = examine(each, asked)
        if found.verdict is not Verdict.ABSENT and _said(found) == _said(examine(each, tree)):
            modules |= {name: None for name in asked.sources if stand_in.module(name) is not None}
    return list(modules)


def _said(found: Finding) -> object:
    return object() if found.verdict is Verdict.UNRECOGNISED else (found.verdict, found.shape)


def differences(stand_in: SourceTree, tree: SourceTree, module: str) -> list[str]:
    """Return the differences between the definitions of a module of a stand-in and those of another tree.

    A name that begins with an underscore and is missing upstream is the stand-in's own.
    """
    ours, theirs = stand_in.module(module), tree.module(module)
    assert ours is not None
    if theirs is None:
        return [f"there is no module {module}"]
    upstream = dict(_outlines(theirs.syntax.body))
    found = []
    for name, outline in _outlines(ours.syntax.body):
        if (real := upstream.get(name)) is None:
            found += [] if _is_own(name) else [f"{module} has no {name}"]
        elif real != outline:
            found.append(f"{module}: {name} is {outline}, upstream's is {real}")
    return found


def _is_own(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _outlines(body: Sequence[ast.stmt], owner: str = "", place: tuple[str, ...] = ()) -> Iterator[tuple[str, _Outline]]:
    for node in body:
        if isinstance(node, _Definition):
            name = f"{owner}{node.name}"
            is_class = isinstance(node, ast.ClassDef)
            takes = ", ".join(map(ast.unparse, [*node.bases, *node.keywords])) if is_class else _signature(node)
            yield name, _Outline(type(node).__name__, place, tuple(map(ast.unparse, node.decorator_list)), takes)
            if is_class:
                yield from _outlines(node.body, f"{name}.")
            continue
        for field in ("body", "orelse", "finalbody", "handlers"):
            if isinstance(below := getattr(node, field, None), list):
                yield from _outlines(below, owner, (*place, f"{type(node).__name__}.{field}"))


def _signature(function: FunctionNode) -> str:
    """Return the parameters of a function with their defaults, without annotations."""
    arguments = copy.deepcopy(function.args)
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(arguments)
