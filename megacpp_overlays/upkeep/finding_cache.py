"""FindingCache: findings on disk, keyed by the code of the probe and by the source texts that it read.

A probe is a function of source texts: it imports no upstream code and reads no clock. So a finding is valid until its code or
its texts change. The key has two parts. The first names the file of a part of an overlay, the second selects a finding in it:

    code    the module of the probe and all modules of this package that it imports, directly or indirectly; the modules that read
            source; the recorded forms; and the version of Python, whose parser affects a finding
    texts   every module that the probe requested, with its text or the fact that it was missing

These findings are not kept, and their probes run each time: those of plugins, those that depend on a file that is no module or cannot
be read, and those that `known.portable` cannot express without paths of the tree.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from megacpp_overlays import files, json_text
from megacpp_overlays.loader import known
from megacpp_overlays.loader.probing import examine
from megacpp_overlays.loader.witnesses import UNREADABLE, RecordingTree
from megacpp_overlays.model import Erratum, Finding
from megacpp_overlays.source import forms
from megacpp_overlays.source.definitions import imported_names
from megacpp_overlays.source.trees import SourceTree

_PROBES = "megacpp_overlays.feature_probes."
_READERS = ("megacpp_overlays.source.file_trees", "megacpp_overlays.source.readings")
"""Modules that read source for a probe; their imports are added, too."""
_BOUNDARY = "megacpp_overlays.loader.probing"
"""The module that runs a probe; its imports are not added."""


class CachedFinding(NamedTuple):
    """A finding, and the modules that its probe requested."""

    finding: Finding
    asked: tuple[str, ...] | None
    """Names of the modules, sorted; None for a probe of a plugin, or where a file was requested that is no module or cannot be read."""


class FindingCache:
    """Findings of the probes of this package.

    Args:
        folder: the folder of the findings, which `save` creates. None keeps them in memory, for this object alone.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._new: set[str] = set()

    def derive(self, erratum: Erratum, tree: SourceTree, *, unless: tuple[type[Exception], ...] = ()) -> CachedFinding:
        """Return the finding of a probe in a tree, as `examine` does; the probe runs only if no finding is kept.

        Args:
            erratum: the declaration.
            tree: the tree that source is read from.
            unless: exceptions of the probe that are propagated; see `examine`.
        """
        if not erratum.probe.__module__.startswith(_PROBES):
            return CachedFinding(examine(erratum, tree, unless=unless), None)
        rows = self._read(erratum)
        if (kept := known.look_up(rows, tree)) is not None:
            return CachedFinding(known.restored(kept.value, tree), kept.asked)
        return self._derive(erratum, tree, unless, rows)

    def _derive(
        self,
        erratum: Erratum,
        tree: SourceTree,
        unless: tuple[type[Exception], ...],
        rows: list[dict[str, Any]],
    ) -> CachedFinding:
        recorded = RecordingTree(tree)
        finding = examine(erratum, recorded, unless=unless)
        if UNREADABLE in recorded.sources.values() or any(":" in name for name in recorded.sources):
            return CachedFinding(finding, None)
        asked = tuple(sorted(recorded.sources))
        sources = [tree.module(name) for name in asked]
        data = known.portable(finding, [each for each in sources if each is not None])
        if data is not None:
            row = next((each for each in rows if each["asked"] == list(asked)), None)
            if row is None:
                rows.append(row := {"asked": list(asked), "found": {}})
            row["found"][known.digest(asked, sources)] = data
            self._new.add(key_of(erratum))
        return CachedFinding(finding, asked)

    def _read(self, erratum: Erratum) -> list[dict[str, Any]]:
        key = key_of(erratum)
        if key not in self._rows:
            self._rows[key] = []
            if self._folder is not None and (path := self._folder / f"{key}.json").is_file():
                try:
                    self._rows[key] = json_text.parse(path.read_bytes())
                except ValueError:
                    path.unlink()  # truncated, such as by a full disk
        return self._rows[key]

    def save(self) -> None:
        """Write the findings that were derived since the last call; without a folder, write nothing.

        Raises:
            OSError: the folder cannot be created, or a file cannot be written.
        """
        if self._folder is not None and self._new:
            self._folder.mkdir(parents=True, exist_ok=True)
            files.write({self._folder / f"{key}.json": json.dumps(self._rows[key]).encode() for key in self._new})
        self._new.clear()


def key_of(erratum: Erratum) -> str:
    """Return the key of a part of an overlay: 32 hexadecimal digits, from its name, the version of Python, its probe's code and its recorded forms."""
    words = (known.name_of(erratum), known.this_python(), _code(erratum.probe.__module__), _recorded(erratum.id))
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:32]


@functools.cache
def _code(module: str) -> str:
    """Return the hash of all code of a probe, by its module."""
    found = hashlib.sha256()
    names = {*closure([module, *_READERS]), _BOUNDARY}
    for name in sorted(names):
        found.update(f"{name} {text_sha256(name)}\n".encode())
    return found.hexdigest()


def _recorded(overlay: str) -> str:
    file = forms.file_of(overlay)
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def text_sha256(module: str) -> str:
    """Return the SHA-256 of the file of a module, in hexadecimal digits.

    Raises:
        ModuleNotFoundError: the module does not exist, or has no file.
    """
    return hashlib.sha256(_path(module).read_bytes()).hexdigest()


def closure(modules: Iterable[str]) -> frozenset[str]:
    """Return the names of modules and of all modules of this package that they import, directly or indirectly, also inside functions."""
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _imported_by(name)
    return frozenset(found)


@functools.cache
def _imported_by(name: str) -> tuple[str, ...]:
    """Return the modules of this package that a module imports."""
    return tuple({each for each in imported_names(ast.parse(_path(name).read_bytes())) if _is_ours(each)})


@functools.cache
def _is_ours(name: str) -> bool:
    return name.startswith("megacpp_overlays.") and _is_module(name)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is a module and not a package: the name is an attribute of that module
        return False


def _path(name: str) -> Path:
    if (loaded := getattr(sys.modules.get(name), "__file__", None)) is not None:
        return Path(loaded)
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{name} has no source here")
    return Path(spec.origin)
