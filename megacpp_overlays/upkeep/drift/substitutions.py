"""The functions, methods and classes of this process that somebody replaced, each with who did it.

Code that a name of a loaded module leads to, and code that this code wraps, must be in a file of the package that owns
the module, or of a library that the module imports. Any other was put there by somebody; a seam of an overlay says so by
its mark. A name that the module defines must lead to code of its own package in the end. Nothing is imported and nothing
is called, so no device is touched.

Not seen is what stays within the package and its libraries: a function of the package in the place of another one, one
of its own decorators more, a name that was deleted, and in the place of a name that is imported, or that an expression
made, anything of a library.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from megacpp_overlays.errors import OverlayError, UpkeepError
from megacpp_overlays.loader import live_names, session
from megacpp_overlays.loader.import_hooks import is_a_shell, is_half_imported
from megacpp_overlays.runtime import seam_marks
from megacpp_overlays.runtime.seam_marks import Mark
from megacpp_overlays.source import published, trees
from megacpp_overlays.upkeep.drift import origins
from megacpp_overlays.upkeep.drift.outlines import Outline, Outlines

ITSELF = "(the module itself)"
"""In place of a symbol, where something else stands in `sys.modules`."""
_DEEPEST = 64
"""Layers of wrappers that are looked through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitution:
    """One name of a loaded module that leads to something else than its source says."""

    module: str
    symbol: str
    by: str
    """Who did it: where the function is defined, with file and line, whatever it calls itself."""
    overlay: str | None = None
    """The overlay whose seam it is; None is somebody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessDrift:
    """What comparing came to."""

    modules: int
    """How many were compared."""
    replaced: tuple[Substitution, ...]
    """Seams of ours among them."""
    unchecked: tuple[str, ...]
    """Modules that nothing can be said about, each with the reason."""


def replaced(packages: Collection[str] | None = None) -> tuple[Substitution, ...]:
    """Return what somebody else than this package replaced in loaded modules.

    Args:
        packages: packages to look at; None is those around every overlay's target.
    """
    return tuple(each for each in look(packages).replaced if each.overlay is None)


def look(packages: Collection[str] | None = None) -> ProcessDrift:
    """Compare every loaded module of some packages with the package that owns it; see `replaced`."""
    if packages is None:
        packages = {published.surroundings_of(overlay.target) for overlay in session.current().overlays}
    found: list[Substitution] = []
    unchecked: list[str] = []
    outlines, count = Outlines(), 0
    for name, module in sorted(sys.modules.items()):
        if not any(f"{name}.".startswith(f"{each}.") for each in packages):
            continue
        try:
            is_module = issubclass(type(module), ModuleType)
            if is_module and is_half_imported(module) and not is_a_shell(module):
                continue  # an empty module may be at its beginning or somebody's, which `_stand_in` tells apart
            if (by := _stand_in(name, module)) is not None:
                found.append(Substitution(module=name, symbol=ITSELF, by=by))
            outline = outlines.of(name) if is_module else None
            changed = [] if outline is None else list(_Comparison(module, outline, outlines).all())
        except OverlayError as error:
            unchecked.append(str(error))
            continue
        except Exception as error:  # noqa: BLE001 - an object of somebody's may raise when it is looked at
            unchecked.append(f"{name}: {type(error).__name__}: {error}")
            continue
        count += outline is not None
        found += changed
    return ProcessDrift(modules=count, replaced=tuple(found), unchecked=tuple(unchecked))


def bring_in(names: Collection[str]) -> None:
    """Import modules, such as a launcher's plugin, for what they do to others.

    Raises:
        UpkeepError: one of them cannot be imported; the text has its reason.
    """
    name = ""
    try:
        for name in names:
            importlib.import_module(name)
    except (Exception, SystemExit) as error:
        way_out = "; put its folder on PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
        raise UpkeepError(f"--import {name}: {type(error).__name__}: {error}{way_out}") from error


def _stand_in(name: str, loaded: object) -> str | None:
    """Return who took the place of a whole module, or None where nobody did.

    What has no Python source, such as a compiled module or a namespace, is nobody's, and so is what the source of a
    module itself puts in its place.
    """
    try:
        attributes: Mapping[str, Any] = object.__getattribute__(loaded, "__dict__")  # and no lazy module is woken
    except AttributeError:
        attributes = {}
    spec, file = attributes.get("__spec__"), attributes.get("__file__")
    if isinstance(spec, ModuleSpec) and spec.name == name and spec.origin == file:
        return None  # as an import left it
    if not (path := _source(name)) or b"sys.modules[" in Path(path).read_bytes():
        return None
    if issubclass(type(loaded), ModuleType):
        return f"the module {attributes.get('__name__')} ({file or 'of no file'})"
    return "None: its import fails" if loaded is None else origins.describe(loaded)


def _source(name: str) -> str | None:
    """Return the Python file that a module would be loaded from."""
    parent = sys.modules.get(name.rpartition(".")[0])
    folders = None if parent is None else getattr(parent, "__dict__", {}).get("__path__", ())
    spec = trees.find_spec(name, folders, None)
    return spec.origin if spec is not None and spec.has_location and (spec.origin or "").endswith(".py") else None


def _is_in_any(name: str, classes: Collection[type]) -> bool:
    return any(name in vars(each) for each in classes)


class _EditedSinceError(OverlayError):
    """Raised when a file is no longer the one that the module was made from."""


class _Comparison:
    """One module against the package that owns it."""

    def __init__(self, module: ModuleType, outline: Outline, outlines: Outlines) -> None:
        self._module = module
        self._outline = outline
        self._package = origins.package_of(module.__name__)
        imports = set(outline.modules)
        for name in outline.modules:  # what a library made may come by way of another module of the package
            if origins.package_of(name) == self._package and (other := outlines.of(name)) is not None:
                imports |= other.modules
        self._imports = frozenset(map(origins.package_of, imports))

    def all(self) -> Iterator[Substitution]:
        """Yield what was replaced.

        Raises:
            _EditedSinceError: it is not the source of this module any more.
        """
        for name, live in live_names.namespace(self._module).items():
            if name in self._outline.changing or name not in self._outline.defined.keys() | self._outline.imported:
                continue
            if self._is_own_class(live, name):
                yield from self._class(live, name)
            else:
                yield from self._value(live, name)

    def _is_own_class(self, live: Any, symbol: str) -> bool:
        if not issubclass(type(live), type):
            return False
        return bool(vars(live).get("__module__") == self._module.__name__ and live.__qualname__ == symbol)

    def _class(self, live: type, prefix: str) -> Iterator[Substitution]:
        above = [each for base in live.__mro__[1:] for each in (base, type(base))]
        # Bases and metaclasses add methods, and so does what makes named tuples.
        makers = {f"namedtuple_{live.__name__}", *map(origins.maker, above)}
        adding = frozenset(map(origins.package_of, makers))
        for name, raw in vars(live).items():
            symbol, value = f"{prefix}.{name}", origins.unwrapped(raw)
            if self._is_own_class(raw, symbol):
                yield from self._class(raw, symbol)
            elif type(value) is FunctionType or symbol in self._outline.defined or _is_in_any(name, above):
                yield from self._value(raw, symbol, adding)

    def _value(self, raw: Any, symbol: str, adding: Collection[str] = ()) -> Iterator[Substitution]:
        for part in origins.accessors(raw):
            marks, foreign = self._behind(part, symbol, adding)
            for mark in marks:
                yield self._replaced(symbol, origins.describe(mark.made), mark.overlay_id)
            if foreign is not None:
                yield self._replaced(symbol, origins.describe(foreign))

    def _behind(self, live: Any, symbol: str, adding: Collection[str]) -> tuple[list[Mark], Any]:
        """Return our seams on the way to the package's own code, and what else is in it."""
        marks: list[Mark] = []
        for _ in range(_DEEPEST):
            if (mark := seam_marks.mark_of(live)) is not None:
                marks.append(mark)
                live = mark.original
                continue
            live = origins.unwrapped(live)
            if not callable(live):  # such as None, where a library is missing
                return marks, None
            package = origins.package_of(origins.maker(live))
            is_own, is_used = self._is_own(live, symbol, package), package in self._imports
            if not is_own and not is_used and package not in adding and package not in sys.stdlib_module_names:
                return marks, live
            if (inner := origins.inner(live)) is None:
                is_end = is_own or is_used or not self._must_end_here(symbol)
                return marks, None if is_end else live
            live = inner
        return marks, None

    def _is_own(self, live: Any, symbol: str, package: str) -> bool:
        if type(live) is not FunctionType:
            return package == self._package
        code = live.__code__
        if code.co_filename.startswith("<"):  # made when it ran, such as the methods of a data class
            is_own = package == self._package or (self._outline.runs_text and "__name__" not in live.__globals__)
            return is_own and not self._must_end_here(symbol)
        named = (live.__qualname__, code.co_name)  # a wrapper has the first from what it wraps, and not the second
        if code.co_filename == self._outline.path and named == (symbol, symbol.rpartition(".")[2]):
            lines = self._outline.defined.get(symbol, {code.co_firstlineno})
            if lines and code.co_firstlineno not in lines:
                raise _EditedSinceError(
                    f"{self._module.__name__}: {self._outline.path} was edited since it was imported"
                )
        return origins.is_in(live, self._package)

    def _must_end_here(self, symbol: str) -> bool:
        """Return whether a name is the module's own, and nothing that it may import instead."""
        return symbol in self._outline.defined and symbol not in self._outline.imported

    def _replaced(self, symbol: str, by: str, overlay: str | None = None) -> Substitution:
        return Substitution(module=self._module.__name__, symbol=symbol, by=by, overlay=overlay)
