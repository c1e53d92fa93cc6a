"""Detection of replaced functions, methods and classes in this process, each with the code that replaced it.

Code that a name of a loaded module leads to, and code that this code wraps, must be in a file of the package that owns
the module, or of a library that the module imports. Any other code is a replacement; the seam of an overlay is known by
its mark. A name that the module defines must finally lead to code of its own package. Nothing is imported and nothing
is called, so no device is touched.

Replacements within the package and its libraries are not detected: a function of the package in the place of another one,
an additional decorator of the package, a deleted name, and any code of a library in the place of an imported name or of the
value of an expression.
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
"""Symbol of a substitution where another object is in `sys.modules` in place of the module."""
_DEEPEST = 64
"""Maximum number of wrapper layers that are followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitution:
    """One name of a loaded module that leads to other code than its source defines."""

    module: str
    symbol: str
    by: str
    """The definition of the replacing function, with file and line, regardless of its own `__name__` and `__module__`."""
    overlay: str | None = None
    """The overlay whose seam it is; None is third-party code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessDrift:
    """The result of comparing the loaded modules."""

    modules: int
    """Number of compared modules."""
    replaced: tuple[Substitution, ...]
    """All substitutions, including the seams of overlays."""
    unchecked: tuple[str, ...]
    """Modules that cannot be checked, each with the reason."""


def replaced(packages: Collection[str] | None = None) -> tuple[Substitution, ...]:
    """Return the names of loaded modules that third-party code replaced.

    Args:
        packages: the packages to examine; None is those around every overlay's target.
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
                continue  # `_stand_in` distinguishes an empty module at the start of its import from a third-party one
            if (by := _stand_in(name, module)) is not None:
                found.append(Substitution(module=name, symbol=ITSELF, by=by))
            outline = outlines.of(name) if is_module else None
            changed = [] if outline is None else list(_Comparison(module, outline, outlines).all())
        except OverlayError as error:
            unchecked.append(str(error))
            continue
        except Exception as error:  # noqa: BLE001 - attribute access of a third-party object may raise
            unchecked.append(f"{name}: {type(error).__name__}: {error}")
            continue
        count += outline is not None
        found += changed
    return ProcessDrift(modules=count, replaced=tuple(found), unchecked=tuple(unchecked))


def bring_in(names: Collection[str]) -> None:
    """Import modules, such as a launcher's plugin, for their effects on other modules.

    Raises:
        UpkeepError: a module cannot be imported; the message has the reason.
    """
    name = ""
    try:
        for name in names:
            importlib.import_module(name)
    except (Exception, SystemExit) as error:
        way_out = "; put its folder on PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
        raise UpkeepError(f"--import {name}: {type(error).__name__}: {error}{way_out}") from error


def _stand_in(name: str, loaded: object) -> str | None:
    """Return a description of the object that replaced a whole module, or None where none did.

    A module without Python source, such as a compiled module or a namespace, does not count as replaced. Neither does an
    object that the module's own source puts in its place.
    """
    try:
        attributes: Mapping[str, Any] = object.__getattribute__(loaded, "__dict__")  # without loading a lazy module
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
    """Raised when a source file was edited after its module was imported."""


class _Comparison:
    """The comparison of one module with the package that owns it."""

    def __init__(self, module: ModuleType, outline: Outline, outlines: Outlines) -> None:
        self._module = module
        self._outline = outline
        self._package = origins.package_of(module.__name__)
        imports = set(outline.modules)
        for name in outline.modules:  # an object of a library may come through another module of the package
            if origins.package_of(name) == self._package and (other := outlines.of(name)) is not None:
                imports |= other.modules
        self._imports = frozenset(map(origins.package_of, imports))

    def all(self) -> Iterator[Substitution]:
        """Yield the replaced names.

        Raises:
            _EditedSinceError: the file was edited after the module was imported.
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
        # Bases, metaclasses and the code that creates named tuples add methods.
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
        """Return the seams of overlays on the way to the package's own code, and the third-party code on it."""
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
        if code.co_filename.startswith("<"):  # generated at run time, such as the methods of a data class
            is_own = package == self._package or (self._outline.runs_text and "__name__" not in live.__globals__)
            return is_own and not self._must_end_here(symbol)
        # a wrapper copies the first from the wrapped function, not the second
        named = (
            live.__qualname__,
            code.co_name,
        )
        if code.co_filename == self._outline.path and named == (symbol, symbol.rpartition(".")[2]):
            lines = self._outline.defined.get(symbol, {code.co_firstlineno})
            if lines and code.co_firstlineno not in lines:
                raise _EditedSinceError(
                    f"{self._module.__name__}: {self._outline.path} was edited since it was imported"
                )
        return origins.is_in(live, self._package)

    def _must_end_here(self, symbol: str) -> bool:
        """Return whether the module defines a name and has no import that may provide it instead."""
        return symbol in self._outline.defined and symbol not in self._outline.imported

    def _replaced(self, symbol: str, by: str, overlay: str | None = None) -> Substitution:
        return Substitution(module=self._module.__name__, symbol=symbol, by=by, overlay=overlay)
