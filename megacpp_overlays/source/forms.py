"""Recorded forms: upstream code that was judged, recognised by the digests of the definitions that decide.

A file in `recorded` has for each part of an overlay the places that its verdict rests on, and for each form of them the verdict, the
trees that have it, and the digest of each place. The command `megacpp-overlays learn` writes it; code has no digests. A tree with the
digests of a form gets its verdict. Any other tree is UNRECOGNISED, with the places in which it differs from the nearest form.

A place is one of

    package.module:function       a definition, decorators included
    package.module:Class.method   the same, with the head of the class
    package.module:Class          the head of a class: decorators, bases and attributes that are set on it; its members are places of their own
    package.module:Class*         all of a class
    package.module:name           how a module imports or assigns a name
    package.module:               all of a module
    package.module:#              the text of a module as it is, which takes no parsing
    package//path/of/file         a file that is no module, without comments and layout
    package//path/of/file#        the same, with them

A definition that is bound twice or below a condition counts with the statements around it. The place of evidence may also be
`package.module#words` or `package//path/of/file#words`: the first place of these words in a text.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megacpp_overlays.errors import SourceError
from megacpp_overlays.frozen import NamedTuple
from megacpp_overlays.model import Body, Evidence, Finding, Proof, Target, Text, Verdict
from megacpp_overlays.source import cpp_source, knowledge
from megacpp_overlays.source.fingerprint import fingerprint, is_docstring
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, ShippedFile, SourceTree, shipped

FOLDER = Path(__file__).with_name("recorded")
"""Folder with one file for each overlay or gate: a start that decides gates reads theirs alone."""
MISSING = "-"
"""Digest of a place that is not there."""
ANY = "*"
"""Digest of a place that a verdict does not depend on."""
_SHOWN = 4
"""Limit on the places that the text of a difference names."""


class Form(NamedTuple):
    """One form of upstream code, and its verdict."""

    verdict: Verdict
    shape: str | None
    trees: tuple[str, ...]
    """Releases that have the form, and branch heads such as `main d98e8a64dd`."""
    seen: tuple[tuple[str, str], ...]
    """Evidence, with the place of each; an empty place where it has none."""
    repair: tuple[str, ...]
    """Places that hold the repair, for FIXED."""
    digests: tuple[str, ...]
    """One digest for each place of the part."""


class FormRecord(NamedTuple):
    """The forms of one part of an overlay."""

    places: tuple[str, ...]
    forms: tuple[Form, ...]


def finding(overlay: str, target: Target, tree: SourceTree, without: Mapping[str, str] = {}) -> Finding:
    """Return the verdict of the recorded form that a tree has, or ABSENT where the tree has no code that could have the defect.

    Args:
        overlay: the id.
        target: the target of the part.
        tree: the tree that is read.
        without: requirements of the defect, each with the evidence for ABSENT where it is missing. A requirement is a place, such as
            `module:` for a module, or `module#word` for a word that the text of a module must have. The module of the target is
            required first.

    Raises:
        SourceError: the tree has no recorded form.
    """
    source = tree.module(target.module)
    if source is None:
        return _absent(f"there is no module {target.module}", None)
    for needed, said in without.items():
        within = tree.module(re.split("[:#]", needed, maxsplit=1)[0])
        if within is None:
            return _absent(said, None)
        if _lacks(within, needed) and not _is_elsewhere(source, target):
            return _absent(said, within)
    kept, digests = _recorded(overlay, target), TreeDigests(tree)
    if (form := digests.form(kept)) is not None:
        return _finding(kept, form, tree)
    raise _unknown(source, next(iter(source.bindings.of(target.symbol)), None), difference(kept, digests))


def _absent(seen: str, source: ModuleSource | None) -> Finding:
    where = Evidence(seen, source.path if source else None)
    return Finding(verdict=Verdict.ABSENT, shape=None, evidence=(where,))


def _unknown(source: ModuleSource, node: ast.AST | None, seen: str) -> SourceError:
    return SourceError(seen, file=source.path, line=getattr(node, "lineno", None))


def _is_elsewhere(source: ModuleSource, target: Target) -> bool:
    """Return whether a module may have the target from another module, so that its own text does not decide."""
    name = target.symbol.partition(".")[0]
    bound = source.bindings.of(name) or source.bindings.of("__getattr__")
    return bool(bound) and not source.bindings.definitions(name)


def known(overlay: str, target: Target, tree: SourceTree) -> Finding | None:
    """Return the verdict of the recorded form that a tree has, or None; for a probe with further checks."""
    kept = _recorded(overlay, target)
    form = TreeDigests(tree).form(kept)
    return None if form is None else _finding(kept, form, tree)


def _recorded(overlay: str, target: Target) -> FormRecord:
    """Return the record of a part without the forms that a rehearsal hides from this process; see `source.knowledge`."""
    kept = record(overlay, target.module)
    return kept._replace(forms=tuple(each for each in kept.forms if knowledge.has(target.distribution, each.trees)))


def difference(record: FormRecord, digests: TreeDigests) -> str:
    """Describe how a tree differs from the nearest recorded form."""
    if not record.forms:
        return "no form of it is recorded"
    others = [list(digests.differing(record.places, form)) for form in record.forms]
    nearest = min(range(len(others)), key=lambda number: (others[number][0].endswith("#"), len(others[number])))
    names = [f"{place} {digests.of(place)}" for place in others[nearest]]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"unlike {span(record.forms[nearest].trees)} in {', '.join(names[:_SHOWN])}{more}"


def span(trees: Sequence[str]) -> str:
    """Return trees as a short text: `0.19.0 to 0.19.2, main d98e8a64dd`."""
    releases, heads = [each for each in trees if " " not in each], [each for each in trees if " " in each]
    last = {each.partition(" ")[0]: each for each in heads}
    ends = [releases[0]] if len(releases) == 1 else [f"{releases[0]} to {releases[-1]}"] if releases else []
    return ", ".join([*ends, *last.values()])


def _lacks(source: ModuleSource, needed: str) -> bool:
    """Return whether a module lacks a requirement: a word of its text, or a definition.

    Raises:
        SourceError: a name is not defined, and the module may bind it in another way, or mentions it.
    """
    _, _, symbol = needed.partition(":")
    if not symbol:
        return needed.partition("#")[2] not in source.text
    name = ""
    for part in symbol.split("."):
        name = f"{name}.{part}" if name else part
        bound = source.bindings.of(name)
        if bound and name != symbol and not any(isinstance(each, ast.ClassDef) for each in bound):
            raise _unknown(source, bound[0], f"{name} is no class that is defined here")
        if not bound:
            source.check_missing(name)
            if re.search(rf"\b{part}\b", source.text):
                raise _unknown(source, None, f"{name} is mentioned and not defined")
            return True
    return False


def _finding(record: FormRecord, form: Form, tree: SourceTree) -> Finding:
    for place, known in zip(record.places, form.digests, strict=True):
        if known != ANY:
            _ask_for(place, tree)
    seen = [*(_evidence(tree, said, place) for said, place in form.seen), Evidence(seen=f"as in {span(form.trees)}")]
    repair = tuple(_repair(tree, place) for place in form.repair)
    proof = Proof.READ if form.verdict is Verdict.FIXED else None
    return Finding(verdict=form.verdict, shape=form.shape, evidence=tuple(seen), repair=repair, proof=proof)


def _ask_for(place: str, tree: SourceTree) -> None:
    """Ask a tree for the names of a place, so that a `ReadingTree` records that the finding rests on them."""
    module, _, symbol = place.partition(":")
    if symbol in {"", "#"} or "//" in place or (source := tree.module(module)) is None:
        return
    parts = symbol.rstrip("*").split(".")
    for depth in range(1, len(parts) + 1):
        source.bindings.of(".".join(parts[:depth]))


def _evidence(tree: SourceTree, said: str, place: str) -> Evidence:
    place, _, words = place.partition("#")
    module, _, symbol = place.partition(":")
    if "//" in place:
        file = shipped(tree, *place.split("//", 1))
        return cpp_source.at(file, words, said) if file and words else Evidence(said, file.path if file else None)
    source = tree.module(module) if module else None
    if source and words:
        return cpp_source.at(source, words, said)
    bound = source.bindings.of(symbol.rstrip("*")) if source and symbol else []
    return Evidence(said, source.path if source else None, getattr(bound[0], "lineno", None) if bound else None)


def _repair(tree: SourceTree, place: str) -> Body | Text:
    if "//" in place:
        file = shipped(tree, *place.split("//", 1))
        assert file is not None  # noqa: S101 - its digest was compared
        return Text(file.path, cpp_source.digest(file.text))
    module, _, symbol = place.partition(":")
    return Body(module, symbol.rstrip("*"))


class TreeDigests:
    """Digests of places of one tree, each taken once. A `ReadingTree` does not record them: most compared forms do not match."""

    def __init__(self, tree: SourceTree) -> None:
        self._tree = _PlainTree(tree)
        self._known: dict[str, str] = {}

    def of(self, place: str) -> str:
        """Return the digest of a place, or in words why it has none."""
        if place not in self._known:
            try:
                self._known[place] = digest(self._tree, place)
            except SourceError as error:
                self._known[place] = f"({error})"
        return self._known[place]

    def differing(self, places: Iterable[str], form: Form) -> Iterator[str]:
        """Yield the places that differ from a form."""
        for place, known in zip(places, form.digests, strict=True):
            if known != ANY and self.of(place) != known:
                yield place

    def form(self, record: FormRecord) -> Form | None:
        """Return the first form of a record that agrees with this tree in every place, or None."""
        return next((each for each in record.forms if not any(self.differing(record.places, each))), None)


class _PlainTree:
    """Tree without the recording of a `ReadingTree`."""

    def __init__(self, tree: SourceTree) -> None:
        self._tree = tree

    def module(self, name: str) -> ModuleSource | None:
        """Return the source of a module."""
        source = self._tree.module(name)
        plain: ModuleSource | None = getattr(source, "plain", source)
        return plain

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        """Return a file that is no module."""
        return shipped(self._tree, package, path)


def digest(tree: SourceTree, place: str) -> str:
    """Return the digest of a place, 16 hexadecimal digits of SHA-256; `-` where the tree has no such place.

    Raises:
        SourceError: its text cannot be read.
    """
    if "//" in place:
        file = shipped(tree, *place.rstrip("#").split("//", 1))
        if file is None:
            return MISSING
        return cpp_source.digest(file.text if place.endswith("#") else cpp_source.plain(file.text))
    module, _, symbol = place.partition(":")
    source = tree.module(module)
    if source is None:
        return MISSING
    if symbol == "#":
        return source.sha256[:16]
    if not symbol:
        return fingerprint([each for each in source.syntax.body if not is_docstring(each)])
    name = symbol.rstrip("*")
    code = _code(source, name, whole=symbol.endswith("*"))
    return MISSING if code is None else fingerprint([code, *source.bindings.changes(name)])


def _code(source: ModuleSource, symbol: str, *, whole: bool) -> object:
    """Return the syntax that binds a name, which may be the `__getattr__` of a module; None where there is none."""
    scope: Sequence[ast.stmt] = source.syntax.body
    parts = symbol.split(".")
    heads: list[object] = []
    for depth in range(1, len(parts) + 1):
        bound = source.bindings.of(".".join(parts[:depth]))
        if not bound:
            handed_on = [] if depth > 1 else source.bindings.of("__getattr__")
            return _statements(source, scope, handed_on) if handed_on else None
        node = bound[0]
        if len(bound) > 1 or not isinstance(node, ast.ClassDef | FunctionNode) or node not in scope:
            # nodes that set a member of a class that may be another one
            outside = source.bindings.of(symbol) if depth < len(parts) else []
            return [*heads, _statements(source, scope, [*bound, *outside])]
        if isinstance(node, ast.ClassDef):
            heads.append([node.decorator_list, node.bases, node.keywords])
        scope = node.body
    if isinstance(node, ast.ClassDef):
        return [*heads, node, *_set_outside(source, symbol, node)] if whole else heads
    return [*heads, node]


def _set_outside(source: ModuleSource, symbol: str, cls: ast.ClassDef) -> Iterator[ast.AST]:
    """Yield the nodes that may set methods of a class outside of it, such as an assignment in a function that gets the class."""
    inside = {id(each) for each in ast.walk(cls)}
    for name in sorted({each.name for each in cls.body if isinstance(each, FunctionNode)}):
        yield from (each for each in source.bindings.of(f"{symbol}.{name}") if id(each) not in inside)


def _statements(source: ModuleSource, scope: Sequence[ast.stmt], bound: Sequence[ast.AST]) -> object:
    """Return the statements of a scope that bind a name; for an import of one name its origin."""
    if len(bound) == 1 and isinstance(bound[0], ast.alias):
        from megacpp_overlays.source.readings import origin_of  # noqa: PLC0415 - not needed to arm

        for each in scope:
            if isinstance(each, ast.ImportFrom) and bound[0] in each.names:
                return ["import", origin_of(source, each), bound[0].name]
    inside = {id(each) for each in bound}
    return [each for each in (*scope, *source.syntax.body) if any(id(node) in inside for node in ast.walk(each))]


def overlays() -> list[str]:
    """Return the ids of the overlays and gates that have a record."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def file_of(overlay: str) -> Path:
    """Return the path of the file with the record of an overlay or a gate; most have one."""
    return FOLDER / f"{overlay}.json"


@functools.cache
def read(overlay: str) -> Mapping[str, Any]:
    """Return the recorded forms of an overlay by the module of each part, as in its file; empty where it has no file."""
    import json  # noqa: PLC0415 - not needed to arm

    file = file_of(overlay)
    data: dict[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
    return data


@functools.cache
def record(overlay: str, module: str) -> FormRecord:
    """Return the recorded forms of the part of an overlay whose target is a module."""
    return parsed(read(overlay)[module])


def parsed(data: Mapping[str, Any]) -> FormRecord:
    """Return the forms of a part from the data of its file."""
    return FormRecord(tuple(data["places"]), tuple(map(_form, data["forms"])))


def _form(data: Mapping[str, Any]) -> Form:
    return Form(
        verdict=Verdict(data["verdict"]),
        shape=data["shape"],
        trees=tuple(data["trees"]),
        seen=tuple((said, place) for said, place in data["seen"]),
        repair=tuple(data["repair"]),
        digests=tuple(data["digests"].split()),
    )
