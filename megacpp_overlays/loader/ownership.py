"""Detect targets already patched by another library.

A probe reads text. If somebody replaced the function since, the text says nothing about what will run, so
the seam must not go in. A decorator in the source explains one wrapper each; any further wrapper, and any
function from another file or line, is somebody else's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from megacpp_overlays.loader.live_names import LiveName
from megacpp_overlays.loader.seams import describe
from megacpp_overlays.runtime.seam_marks import plain_function
from megacpp_overlays.source.readings import first_line, wrappers
from megacpp_overlays.source.trees import ModuleSource


class Place(NamedTuple):
    """Where a function is written."""

    line: int
    """The first one, of a decorator if it has any."""
    wrappers: int
    """How many wrappers its decorators explain."""


def place_of(source: ModuleSource, symbol: str) -> Place | None:
    """Return where a function or method is written, or None where no function is defined under its name.

    Raises:
        SourceError: it is defined more than once.
    """
    node = source.defined(symbol)
    if node is None:
        return None
    return Place(first_line(node), wrappers(node))


def foreign_owner(live: LiveName, symbol: str, source: ModuleSource, place: Place | None = None) -> str | None:
    """Return who replaced a symbol since its module was written, or None when it is upstream's own.

    Our own seams count as upstream's own, wrapped or not: behind them is the original.

    Args:
        live: what the symbol leads to.
        symbol: a function or method of a module.
        source: of the module.
        place: where it is written, if that is known: the source is not parsed then.
    """
    raw = live.original
    place = place or place_of(source, symbol)
    if place is None:
        return f"{symbol} is not in {source.path}, yet it is loaded: {describe(raw)}"
    for layer in layers(raw, place.wrappers):
        # By type: the proxy of somebody's patch answers with the code of what it wraps.
        if type(layer) is FunctionType and _is_at(layer.__code__, place, source):
            return None
    return f"{symbol} was replaced by {describe(raw)}"


_INNER = ("__wrapped__", "fn", "func")
"""Where a wrapper keeps what it wraps: functools and torch, Triton's kernels and tuners, partials and TileLang."""
_BEHIND_ONE = "orig_func"
"""Where TileLang's decorator keeps it, in an object that its wrapper holds: one decorator, and two objects."""


def layers(raw: Any, wrappers: int) -> Iterator[Any]:
    """Yield what an attribute leads to: what is there, then what each of as many wrappers holds."""
    live: Any = plain_function(raw)
    for _ in range(wrappers + 1):
        live = getattr(live, _BEHIND_ONE, live)
        yield live
        live = next((inner for each in _INNER if (inner := getattr(live, each, None)) is not None), None)


def _is_at(code: CodeType, place: Place, source: ModuleSource) -> bool:
    return code.co_firstlineno == place.line and same_file(code.co_filename, source.path)


def same_file(one: str, other: str) -> bool:
    """Return whether two paths lead to one file, through links, too."""
    return one == other or _lead_to_one_file(one, other)


@functools.lru_cache(maxsize=1024)
def _lead_to_one_file(one: str, other: str) -> bool:
    first, second = Path(one), Path(other)
    return first.exists() and second.exists() and first.samefile(second)
