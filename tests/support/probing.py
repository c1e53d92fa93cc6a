"""A probe as the loader asks it, whatever it raises has recognised nothing, and trees of given texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes.repairs import Repairs, meaning
from megacpp_overlays.loader.probing import examine
from megacpp_overlays.model import Body, Finding
from megacpp_overlays.source.trees import ModuleSource, ShippedFile, SourceTree, shipped


def ask(probe: Callable[[SourceTree], Finding], tree: SourceTree) -> Finding:
    """Return the finding of a probe, UNRECOGNISED where it raises."""
    declared: Any = SimpleNamespace(probe=probe)
    return examine(declared, tree)


def as_if_read(tree: SourceTree, *places: str) -> Repairs:
    """Return the table that somebody would write who had read a repair in these places of a tree."""
    return {"this tree": {place: meaning(tree, place) for place in places}}


def places_of(finding: Finding) -> list[str]:
    """Return the places in which what looks repaired would have to be read."""
    assert finding.looks_repaired, finding
    return [f"{each.module}:{each.symbol}" for each in finding.repair if isinstance(each, Body)]


class Texts:
    """A tree with other texts for some modules, or with nothing else; a file that is none is named `package:path`."""

    def __init__(self, texts: Mapping[str, str | None], tree: SourceTree | None = None) -> None:
        self._texts = texts
        self._tree = tree

    def module(self, name: str) -> ModuleSource | None:
        if name not in self._texts:
            return None if self._tree is None else self._tree.module(name)
        text = self._texts[name]
        return None if text is None else ModuleSource(name, f"{name.rpartition('.')[2]}.py", text)

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        if (name := f"{package}:{path}") not in self._texts:
            return None if self._tree is None else shipped(self._tree, package, path)
        text = self._texts[name]
        return None if text is None else ShippedFile(path, text)
