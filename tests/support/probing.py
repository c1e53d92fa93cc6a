"""A probe as the loader asks it, whatever it raises has recognised nothing, and trees of given texts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.loader.probing import examine
from megacpp_overlays.model import Finding
from megacpp_overlays.source.file_trees import ArchiveTree, DirectoryTree
from megacpp_overlays.source.trees import ModuleSource, ShippedFile, ShippingTree, SourceTree, shipped


def ask(probe: Callable[[SourceTree], Finding], tree: SourceTree) -> Finding:
    """Return the finding of a probe, UNRECOGNISED where it raises."""
    declared: Any = SimpleNamespace(probe=probe)
    return examine(declared, tree)


@functools.lru_cache(maxsize=48)
def source_of(name: str, path: str, text: str) -> ModuleSource:
    """Return the source of a text, the same one for the same text: probes that are asked in a row parse it once."""
    return ModuleSource(name, path, text)


class ParsedOnce:
    """A tree whose modules are parsed once for the probes that are asked about it in a row."""

    def __init__(self, tree: ShippingTree) -> None:
        self._tree = tree

    @functools.cache  # noqa: B019 - it lives as long as the tests that read it
    def _module(self, name: str) -> ModuleSource | None:
        return self._tree.module(name)

    def module(self, name: str) -> ModuleSource | None:
        found = self._module(name)
        return None if found is None else source_of(name, found.path, found.text)

    @functools.cache  # noqa: B019
    def shipped(self, package: str, path: str) -> ShippedFile | None:
        return shipped(self._tree, package, path)


@functools.cache
def parsed_once(path: Path) -> ParsedOnce:
    """Return the tree of an archive, or of a folder; the same one for the same path."""
    return ParsedOnce(DirectoryTree(path) if path.is_dir() else ArchiveTree(path))


class Texts:
    """A tree with other texts for some modules, or with nothing else; a file that is none is named `package:path`."""

    def __init__(self, texts: Mapping[str, str | None], tree: SourceTree | None = None) -> None:
        self._texts = texts
        self._tree = tree

    def module(self, name: str) -> ModuleSource | None:
        if name not in self._texts:
            return None if self._tree is None else self._tree.module(name)
        text = self._texts[name]
        return None if text is None else source_of(name, f"{name.rpartition('.')[2]}.py", text)

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        if (name := f"{package}:{path}") not in self._texts:
            return None if self._tree is None else shipped(self._tree, package, path)
        text = self._texts[name]
        return None if text is None else ShippedFile(path, text)
