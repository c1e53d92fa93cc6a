"""Detect targets already patched by another library.

A probe reads text. If somebody replaced the function since, the text says nothing about what will run, so
the seam must not go in. A decorator in the source explains one wrapper each; any further wrapper, and any
function from another file or line, is somebody else's.
"""

from __future__ import annotations

from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from megacpp_overlays.loader import seams
from megacpp_overlays.runtime import seam_marks
from megacpp_overlays.source.trees import FunctionNode, ModuleSource

_DESCRIPTORS = {"staticmethod", "classmethod", "property"}


class Place(NamedTuple):
    """Where a function is written."""

    line: int
    """The first one, of a decorator if it has any."""
    wrappers: int
    """How many wrappers its decorators explain."""


def place_of(source: ModuleSource, symbol: str) -> Place | None:
    """Return where a function or method is written, or None where its name is no function.

    Raises:
        SourceError: the text does not say which definition is live.
    """
    node = source.function(symbol)
    if node is None:
        return None
    return Place(min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]), wrappers(node))


def foreign_owner(module: ModuleType, symbol: str, source: ModuleSource, place: Place | None = None) -> str | None:
    """Return who replaced a symbol since its module was written, or None when it is upstream's own.

    Our own seams count as upstream's own, wrapped or not: behind them is the original.

    Args:
        module: as it is loaded.
        symbol: a function or method in it.
        source: of the module.
        place: where it is written, if that is known: the source is not parsed then.
    """
    owner, name = seams.resolve(module, symbol)
    raw, _ = seams.raw_attribute(owner, name)
    if (mark := seam_marks.mark_behind(raw)) is not None:
        raw = mark.original
    place = place or place_of(source, symbol)
    if place is None:
        return f"{symbol} is not in {source.path}, yet it is loaded: {seams.describe(raw)}"
    live: Any = seam_marks.plain_function(raw)
    for _ in range(place.wrappers + 1):
        # By type: the proxy of somebody's patch answers with the code of what it wraps.
        if type(live) is FunctionType and _is_at(live.__code__, place, source):
            return None
        live = getattr(live, "__wrapped__", None)
    return f"{symbol} was replaced by {seams.describe(raw)}"


def wrappers(node: FunctionNode) -> int:
    """Return how many wrappers the decorators of a definition explain."""
    names = (getattr(decorator, "id", None) for decorator in node.decorator_list)
    return sum(name not in _DESCRIPTORS for name in names)


def _is_at(code: CodeType, place: Place, source: ModuleSource) -> bool:
    return code.co_firstlineno == place.line and same_file(code.co_filename, source.path)


def same_file(one: str, other: str) -> bool:
    """Return whether two paths lead to one file, through links, too."""
    if one == other:
        return True
    first, second = Path(one), Path(other)
    return first.exists() and second.exists() and first.samefile(second)
