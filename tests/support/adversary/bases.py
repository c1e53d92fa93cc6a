"""Bases of mutants: a probe, a release or tree, the finding there, and the bodies that it rests on."""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from places import ROOT, WHEELS
from probing import ParsedOnce, source_of
from trees import STAND_INS

from adversary.outline import Outline
from megacpp_overlays.errors import OverlayError
from megacpp_overlays.loader.probing import examine
from megacpp_overlays.model import Body, Erratum, Finding, Verdict
from megacpp_overlays.source import fingerprint, forms
from megacpp_overlays.source.file_trees import ArchiveTree, DirectoryTree
from megacpp_overlays.source.trees import ModuleSource, ShippedFile, SourceTree, shipped

FEW = (
    "liger_kernel-0.8.1-",
    "liger_kernel-0.8.5-",
    "megatron_core-0.19.2-",
    "mamba_ssm-2.3.2.",
    "torch-2.15.0-",
)
"""Releases that stand for the others where there is little time."""


@dataclass(frozen=True)
class Place:
    """A name in a module."""

    module: str
    symbol: str


@dataclass(frozen=True)
class Base:
    """One probe and one tree."""

    part: Erratum
    release: str
    tree: ReadTexts
    finding: Finding
    bodies: frozenset[Place]
    """The bodies that the verdict depends on: places of the form that was matched, or nodes that the probe took fingerprints of."""

    @property
    def name(self) -> str:
        """Return the name of the overlay, with the module that this part of it is about."""
        return name_of(self.part)

    @property
    def repair(self) -> frozenset[Place]:
        """Return the bodies that hold a repair, if this has one."""
        return frozenset(Place(each.module, each.symbol) for each in self.finding.repair if isinstance(each, Body))

    @property
    def seams(self) -> frozenset[Place]:
        """Return the places that the shape of the finding replaces."""
        return self.seams_of(self.finding.shape)

    def seams_of(self, shape: str | None) -> frozenset[Place]:
        """Return the places that a shape replaces."""
        found = self.part.repairs.get(shape or "", ())
        return frozenset(Place(self.part.target.module, each.symbol) for each in found)


@dataclass
class ReadTexts:
    """The texts that a probe asked a tree for; no other is kept."""

    texts: dict[str, str | None] = field(default_factory=dict)
    files: dict[tuple[str, str], ShippedFile | None] = field(default_factory=dict)
    failing: dict[object, OverlayError] = field(default_factory=dict)
    more: SourceTree | None = None
    """Where a mutant's probe looks that asks for more."""

    def module(self, name: str) -> ModuleSource | None:
        """Return the source of a module."""
        if name in self.failing:
            raise self.failing[name]
        if name not in self.texts:
            return self.more.module(name) if self.more is not None else None
        text = self.texts[name]
        return None if text is None else source_of(name, f"{name.replace('.', '/')}.py", text)

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        """Return a file that is no module."""
        if (package, path) in self.failing:
            raise self.failing[package, path]
        if (package, path) not in self.files and self.more is not None:
            return shipped(self.more, package, path)
        return self.files.get((package, path))

    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for trees that are the same to a probe."""
        return (tuple(self.texts.items()), tuple((key, file and file.text) for key, file in self.files.items()))


class _RecordingTree:
    """A tree that records the texts and files that it was asked for, with one source for each name."""

    def __init__(self, tree: SourceTree) -> None:
        self._tree = tree
        self.read = ReadTexts(more=tree)
        self.sources: dict[str, ModuleSource | None] = {}

    def module(self, name: str) -> ModuleSource | None:
        if name not in self.sources:
            try:
                self.sources[name] = self._tree.module(name)
            except OverlayError as error:
                self.read.failing[name] = error
                raise
            found = self.sources[name]
            self.read.texts[name] = None if found is None else found.text
        return self.sources[name]

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        try:
            found = shipped(self._tree, package, path)
        except OverlayError as error:
            self.read.failing[package, path] = error
            raise
        self.read.files[package, path] = found
        return found


def base(part: Erratum, release: str, tree: SourceTree) -> Base:
    """Run a probe on a tree, and record the texts that it read and the nodes that it took fingerprints of."""
    recording = _RecordingTree(tree)
    taken: list[object] = []
    with _fingerprints(taken):
        finding = examine(part, recording)
    bodies = frozenset[Place]()
    if finding.verdict is Verdict.BROKEN:
        asks_record = part.probe.__module__.startswith("megacpp_overlays.feature_probes.")
        recorded = asks_record and part.target.module in forms.read(part.id)
        bodies = frozenset(_of_form(part, tree) if recorded else _places(recording.sources, taken))
    return Base(part, release, recording.read, finding, bodies)


@contextlib.contextmanager
def _fingerprints(taken: list[object]) -> Iterator[None]:
    """Record the nodes that probes take fingerprints of."""
    original = fingerprint.fingerprint

    def noting(node: object) -> str:
        taken.append(node)
        return original(node)

    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if vars(module).get("fingerprint") is original and name != fingerprint.__name__:
                stack.enter_context(mock.patch.object(module, "fingerprint", noting))
        yield


def _of_form(part: Erratum, tree: SourceTree) -> Iterator[Place]:
    """Yield the places of the recorded form that a tree has; heads of classes and files that are no modules have no body."""
    record, digests = forms.record(part.id, part.target.module), forms.TreeDigests(tree)
    form = digests.form(record)
    for place, known in zip(record.places, form.digests if form else (), strict=False):
        module, _, symbol = place.partition(":")
        if known in {forms.ANY, forms.MISSING} or "//" in place:
            continue
        source = tree.module(module)
        found = source.bindings.definitions(symbol) if source and symbol and symbol[-1] not in "*#" else []
        if not any(isinstance(each, ast.ClassDef) for each in found):
            yield Place(module, symbol.rstrip("*#"))


def _places(sources: dict[str, ModuleSource | None], taken: Iterable[object]) -> Iterator[Place]:
    nodes = {id(node) for each in taken for node in _flat(each)}
    for name, source in sources.items():
        if source is None or "syntax" not in vars(source):
            continue
        outline = _outline(source)
        for node, symbols in outline.of_node.items():
            if node in nodes:
                yield from (Place(name, symbol) for symbol in symbols)


@functools.lru_cache(maxsize=48)
def _outline(source: ModuleSource) -> Outline:
    return Outline(source.text, source.syntax)


def _flat(node: object) -> Iterator[ast.AST]:
    if isinstance(node, ast.AST):
        yield node
    elif isinstance(node, list | tuple):
        for each in node:
            yield from _flat(each)


def name_of(part: Erratum) -> str:
    """Return the name of a part."""
    return f"{part.id}/{part.target.module.rpartition('.')[2]}"


@dataclass(frozen=True)
class Source:
    """A release or tree that can be read."""

    name: str
    open: Callable[[], SourceTree]


def sources(only: Sequence[str] | None = None) -> list[Source]:
    """Return every release and tree that tests know: wheels, stand-ins, and the packages of lanes.

    Args:
        only: beginnings of names of wheels; then lanes are left out.
    """
    wheels = [path for path in sorted(WHEELS.glob("*-*")) if only is None or path.name.startswith(tuple(only))]
    found = [
        Source("-".join(path.name.split("-")[:2]).removesuffix(".tar.gz"), lambda path=path: ArchiveTree(path))
        for path in wheels
    ]  # type: ignore[misc]
    found += [Source(name, lambda path=path: DirectoryTree(path)) for name, path in STAND_INS.items()]  # type: ignore[misc]
    if only is None:
        lanes: list[Path] = sorted((ROOT / ".envs").glob("*/lib/python3*/site-packages"))
        found += [Source(f"lane {path.parents[2].name}", lambda path=path: DirectoryTree(path)) for path in lanes]  # type: ignore[misc]
    return found


def bases(parts: Sequence[Erratum], only: Sequence[str] | None = None) -> list[Base]:
    """Return a base for each part and each tree, with the finding of the part's probe; equal texts give one base.

    Args:
        parts: of all overlays.
        only: beginnings of names of wheels, as with `sources`.
    """
    found: list[Base] = []
    known = set[tuple[object, ...]]()
    for each in sources(only):
        tree = each.open()
        read = ParsedOnce(tree)
        for part in parts:
            made = base(part, each.name, read)
            made.tree.more = None  # an archive is closed, so a mutant's probe finds only the recorded texts
            key = (part.id, part.target.module, made.tree.key())
            if key not in known and any(text is not None for text in made.tree.texts.values()):
                known.add(key)
                found.append(made)
        if isinstance(tree, ArchiveTree):
            tree.close()
    return found
