"""Tables of recorded repairs, for probes of plugins: a tree that has all of one of them is FIXED.

Probes of this package use recorded forms instead (`source.forms`). A probe keeps a table of the trees in which a repair was read. Each
row names the code that holds the repair and the code that the repair depends on: the caller that passes an argument, the helper that is
called, the name that a module imports. An edit in any of them can bring the defect back although the repair is still there, so each
is compared as a whole: a definition with its decorators, the head of its class and the names of its members, and the module's
bindings of every name that it uses, including the functions among them and the names that those use. A tree that differs anywhere looks
repaired at best, and is UNRECOGNISED.

    _PLACES = (
        "package.module:function",
        "package.module:Class.method",
        "package.module:imported_name",
        "package.module:*attribute",  # every definition whose text has this word
        "package.other:",  # the whole module
    )
    _REPAIRED = table(_PLACES, {"0.8.5": "0123456789abcdef 123456789abcdef0 23456789abcdef01 - 3456789abcdef012"})

`meaning` gives the fingerprint of a place.
"""

from __future__ import annotations

import ast
import bisect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from megacpp_overlays.errors import SourceError
from megacpp_overlays.model import Body, Evidence, Finding, Proof, Verdict
from megacpp_overlays.source.fingerprint import fingerprint, is_docstring
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, SourceTree, readable

Repairs = Mapping[str, Mapping[str, str]]
"""Fingerprints by place, such as `module:symbol`, by the trees in which they were read together."""
_Definition = ast.ClassDef | FunctionNode
_NOT_THERE = "-"


def table(places: Sequence[str], trees: Mapping[str, str]) -> Repairs:
    """Return the table of repairs with the same places: by tree the fingerprint of each place, `-` where the tree does not have it."""
    return {read_in: dict(zip(places, bodies.split(), strict=True)) for read_in, bodies in trees.items()}


def judged(
    tree: SourceTree,
    repairs: Repairs,
    *seen: Evidence,
    places: Sequence[str] = (),
    texts: Mapping[str, str] = {},
    bodies: Sequence[Body] = (),
) -> Finding:
    """Return FIXED where all places of a repair are as in a recorded tree, else UNRECOGNISED that looks repaired.

    Args:
        tree: the tree to judge.
        repairs: the table of recorded repairs.
        seen: evidence that made the probe look for a repair.
        places: places of a repair that no tree is recorded for yet.
        texts: fingerprints of whole modules by the first 16 digits of the hash of their text, as released: to parse
            them and to hash the syntax takes twenty times as long.
        bodies: definitions to compare with the live process; by default all compared places.
    """
    found = {
        where: _by_text(tree, where, texts) or meaning(tree, where)
        for where in dict.fromkeys([*places, *(where for known in repairs.values() for where in known)])
    }
    strange = list(found)
    for read_in, known in repairs.items():
        other = [where for where, body in known.items() if found[where] != body]
        if not other:
            said = (*seen, Evidence(seen=f"as in {read_in}"))
            repair = tuple(bodies or _bodies(tree, known))
            return Finding(verdict=Verdict.FIXED, shape=None, evidence=said, repair=repair, proof=Proof.READ)
        strange = min(strange, other, key=len)
    unknown = ", ".join(f"{where} {found[where]}" for where in strange)
    why = Evidence(seen=f"not as in a tree that was read: {unknown}" if repairs else "no repair was read yet")
    repair = tuple(bodies or _bodies(tree, found))
    return Finding(verdict=Verdict.UNRECOGNISED, shape=None, evidence=(*seen, why), repair=repair, looks_repaired=True)


def _by_text(tree: SourceTree, where: str, texts: Mapping[str, str]) -> str | None:
    """Return the fingerprint of a whole module whose text is known, or None."""
    if not texts or not where.endswith(":") or (source := readable(tree, where[:-1])) is None:
        return None
    return texts.get(source.sha256[:16])


def meaning(tree: SourceTree, where: str) -> str:
    """Return the fingerprint of a place of a table, `-` where the tree does not have it, or in words why it has none."""
    module, _, symbol = where.partition(":")
    try:
        source = tree.module(module)
        if source is None:
            return _NOT_THERE
        reader = _Reader(source)
        if symbol.startswith("*"):
            return fingerprint([[each, reader.meaning(each)] for each in _mentioning(source, symbol[1:])])
        return reader.meaning(symbol)
    except SourceError as error:
        return f"({error})"


def _bodies(tree: SourceTree, places: Iterable[str]) -> list[Body]:
    bodies: list[Body] = []
    for where in places:
        module, _, symbol = where.partition(":")
        source = tree.module(module)
        if source is None:
            continue
        symbols = _mentioning(source, symbol[1:]) if symbol.startswith("*") else [symbol]
        bodies += [Body(module, each) for each in symbols if not each or source.bindings.of(each)]
    return list(dict.fromkeys(bodies))


def _mentioning(source: ModuleSource, word: str) -> list[str]:
    """Return the functions, methods and classes of a module whose text has a word; an empty name for the whole module."""
    lines = [number for number, line in enumerate(source.text.splitlines(), 1) if re.search(rf"\b{word}\b", line)]
    return list(dict.fromkeys(name for line in lines for name in _around(source.syntax.body, line)))


def _around(body: Sequence[ast.stmt], line: int) -> list[str]:
    for node in body:
        if _place(node)[0] <= line <= (node.end_lineno or 0):
            if isinstance(node, ast.ClassDef):
                inside = [name for name in _around(node.body, line) if name]
                return [f"{node.name}.{name}" for name in inside] or [node.name]
            return [node.name] if isinstance(node, FunctionNode) else [""]
    return []  # a comment between two statements


class _Reader:
    """Reader of the fingerprints of one module's definitions."""

    def __init__(self, source: ModuleSource) -> None:
        self._source = source
        self._body = source.syntax.body
        self._starts = [_place(each) for each in self._body]

    def meaning(self, symbol: str) -> str:
        """Return the fingerprint of a definition with its enclosing classes and the bindings of the names in it.

        For a name that the module imports or assigns, it is the fingerprint of the statements that bind it; for an empty
        name, that of the module.

        Raises:
            SourceError: the name is bound more than once, below a condition or by no definition, or a method of a class is set
                outside of the class.
        """
        if not symbol:
            return fingerprint([each for each in self._body if not is_docstring(each)])
        bindings = self._source.bindings
        if "." not in symbol and bindings.of(symbol) and not bindings.definitions(symbol):
            return fingerprint(self._bound(symbol))
        parts = symbol.split(".")
        if not bindings.of(parts[0]) or not bindings.of(symbol):
            return _NOT_THERE
        *classes, node = (self._standing(".".join(parts[:depth])) for depth in range(1, len(parts) + 1))
        if isinstance(node, ast.ClassDef):
            self._check_members(symbol, node)
        heads = [[each.decorator_list, getattr(each, "bases", []), getattr(each, "keywords", [])] for each in classes]
        members = [sorted({getattr(each, "name", "") for each in cls.body}) for cls in classes]
        read = [node, *(each for head in heads for kind in head for each in kind)]
        return fingerprint([node, heads, members, *self._used(read), *bindings.changes(symbol)])

    def _used(self, nodes: Sequence[ast.AST]) -> Iterator[object]:
        """Yield the module's names that code uses, each with its bindings; functions among the bindings are followed in the same way."""
        waiting, said = list(nodes), set[str]()
        while waiting:
            for name in sorted(_global_names([waiting.pop()]) - said):
                said.add(name)
                bound = self._bound(name)
                yield [name, bound]
                functions = [each for each in bound if isinstance(each, FunctionNode)]
                waiting += functions

    def _standing(self, symbol: str) -> _Definition:
        """Return the one definition of a name, at its place: not below a condition, and bound by nothing else."""
        owner, _, name = symbol.rpartition(".")
        scope: Sequence[ast.stmt] = self._standing(owner).body if owner else self._body
        bindings = self._source.bindings.of(symbol)
        found = bindings[0] if bindings else None
        if len(bindings) > 1 or not isinstance(found, _Definition) or found not in scope:
            line = getattr(found, "lineno", None)
            raise SourceError(
                f"{name} is bound more than once, below a condition, or by no definition",
                file=self._source.path,
                line=line,
            )
        return found

    def _check_members(self, symbol: str, cls: ast.ClassDef) -> None:
        """Check that no code outside of a class sets a method of it.

        Raises:
            SourceError: such code may set one.
        """
        for name in {each.name for each in cls.body if isinstance(each, FunctionNode)}:
            for each in self._source.bindings.of(f"{symbol}.{name}"):
                line = getattr(each, "lineno", 0)
                if not cls.lineno <= line <= (cls.end_lineno or 0):
                    raise SourceError(f"{symbol}.{name} is set outside of its class", file=self._source.path, line=line)

    def _bound(self, name: str) -> list[object]:
        """Return the bindings of a module's name: a class by its name, any other one at the module's level as a statement.

        A binding inside of a definition is the node alone: definitions that matter are read by themselves.
        """
        found: list[object] = []
        for node in self._source.bindings.of(name):
            around = self._body[max(bisect.bisect_right(self._starts, _place(node)) - 1, 0)]
            entry: object = node if isinstance(around, _Definition) else around
            if node is around and isinstance(node, ast.ClassDef):
                entry = [type(node).__name__, name]
            if not any(entry is each for each in found):
                found.append(entry)
        return found


def _global_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that code uses and does not bind itself."""
    used, own = set[str](), set[str]()
    for node in (inner for each in nodes for inner in ast.walk(each)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else own).add(node.id)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
    return used - own


def _place(node: ast.AST) -> tuple[int, int]:
    """Return the line and column at which a node begins, with its decorators."""
    decorators = [each.lineno for each in getattr(node, "decorator_list", ())]
    if decorators:
        return min(decorators), 0
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
