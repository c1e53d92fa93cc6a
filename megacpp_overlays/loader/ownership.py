"""Detection of targets that another library has patched already.

A probe reads source text. If other code has replaced the function since, the text does not describe the function that will run,
so the seam must not be installed. Each decorator in the source accounts for one wrapper. Any further wrapper, and any
function from another file or line, is third-party code.
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
    """The position of a function in its source."""

    line: int
    """First line, of a decorator if there is one."""
    wrappers: int
    """Number of wrappers that its decorators account for."""


def place_of(source: ModuleSource, symbol: str) -> Place | None:
    """Return the position of a function or method in its source, or None if no function is defined under its name.

    Raises:
        SourceError: it is defined more than once.
    """
    node = source.defined(symbol)
    if node is None:
        return None
    return Place(first_line(node), wrappers(node))


def foreign_owner(live: LiveName, symbol: str, source: ModuleSource, place: Place | None = None) -> str | None:
    """Return a description of the foreign code in the place of a symbol, or None if upstream's own code is there.

    Seams of this package count as upstream's own code, wrapped or not, because they lead to the original.

    Args:
        live: the live name of the symbol.
        symbol: a function or method of a module.
        source: of the module.
        place: its position in the source, if it is known; the source is not parsed then.
    """
    raw = live.original
    place = place or place_of(source, symbol)
    if place is None:
        return f"{symbol} is not in {source.path}, yet it is loaded: {describe(raw)}"
    for layer in layers(raw, place.wrappers):
        # By type: a third-party proxy returns the code of the function that it wraps.
        if type(layer) is FunctionType and _is_at(layer.__code__, place, source):
            return None
    return f"{symbol} was replaced by {describe(raw)}"


_INNER = ("__wrapped__", "fn", "func")
"""Attributes in which a wrapper keeps the wrapped function: functools and torch, Triton's kernels and tuners, partials and TileLang."""
_BEHIND_ONE = "orig_func"
"""Attribute of TileLang's decorator, in an object that its wrapper holds: one decorator makes two objects."""


def layers(raw: Any, wrappers: int) -> Iterator[Any]:
    """Yield the function of an attribute, then the function inside each wrapper, for the given number of wrappers."""
    live: Any = plain_function(raw)
    for _ in range(wrappers + 1):
        live = getattr(live, _BEHIND_ONE, live)
        yield live
        live = next((inner for each in _INNER if (inner := getattr(live, each, None)) is not None), None)


def _is_at(code: CodeType, place: Place, source: ModuleSource) -> bool:
    return code.co_firstlineno == place.line and same_file(code.co_filename, source.path)


def same_file(one: str, other: str) -> bool:
    """Return whether two paths name the same file, also through links."""
    return one == other or _lead_to_one_file(one, other)


@functools.lru_cache(maxsize=1024)
def _lead_to_one_file(one: str, other: str) -> bool:
    first, second = Path(one), Path(other)
    return first.exists() and second.exists() and first.samefile(second)
