"""What in this process was replaced since its source was written, and by whom.

Every function and class that the source of a loaded module defines is compared with the object that its name leads to
now, and every name that it imports with what that name leads to at home. Nothing is imported and nothing is called, so no device is touched.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from megacpp_overlays.errors import OverlayError, UpkeepError
from megacpp_overlays.loader import seams, session
from megacpp_overlays.loader.import_hooks import is_half_imported
from megacpp_overlays.runtime import seam_marks
from megacpp_overlays.source.trees import InstalledTree, ModuleSource
from megacpp_overlays.upkeep.drift import bindings, borrowed, definers, swapped
from megacpp_overlays.upkeep.drift.bindings import Name

ITSELF = "(the module itself)"
"""In place of a symbol, where something else stands in `sys.modules`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """One name of a loaded module that leads to something else than its source says."""

    module: str
    symbol: str
    by: str
    """Who did it: where the function is defined, with file and line, whatever it calls itself."""
    overlay: str | None = None
    """The overlay whose seam it is; None is somebody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What comparing came to."""

    modules: int
    """How many were compared."""
    replaced: tuple[Replaced, ...]
    """Seams of ours among them."""
    unchecked: tuple[str, ...]
    """Modules that nothing can be said about, each with the reason."""


def replaced(packages: Collection[str] | None = None) -> tuple[Replaced, ...]:
    """Return what somebody else than this package replaced in loaded modules.

    Args:
        packages: top-level packages to look at; None is those of every overlay's target.
    """
    return tuple(each for each in look(packages).replaced if each.overlay is None)


def look(packages: Collection[str] | None = None) -> Running:
    """Compare every loaded module of some packages with its source; see `replaced`."""
    if packages is None:
        packages = {overlay.target.module.partition(".")[0] for overlay in session.current().overlays}
    found: list[Replaced] = []
    unchecked: list[str] = []
    count = 0
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in packages:
            continue
        try:
            is_module = issubclass(type(module), ModuleType)
            if is_module and is_half_imported(module):
                continue
            if (by := swapped.by(name, module)) is not None:
                found.append(Replaced(module=name, symbol=ITSELF, by=by))
            if not is_module or not _is_python(module):
                continue
            source = InstalledTree().module(name)
            changed = [] if source is None else list(_Comparison(module, source, packages).all())
        except OverlayError as error:
            unchecked.append(str(error))
            continue
        except Exception as error:  # noqa: BLE001 - an object of somebody's may raise when it is looked at
            unchecked.append(f"{name}: {type(error).__name__}: {error}")
            continue
        count += source is not None
        found += changed
    return Running(modules=count, replaced=tuple(found), unchecked=tuple(unchecked))


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


def _is_python(module: ModuleType) -> bool:
    """Return whether a module has a source at all: what is compiled has none, and neither has a namespace."""
    file = seams.namespace(module).get("__file__")
    return isinstance(file, str) and file.endswith((".py", ".pyc"))


class _EditedSinceError(OverlayError):
    """Raised when a file is no longer the one that the module was made from."""


class _Comparison:
    """One module against its source."""

    def __init__(self, module: ModuleType, source: ModuleSource, packages: Collection[str]) -> None:
        self._packages_of_all = packages
        self._module = module
        self._source = source
        self._own = module.__name__.partition(".")[0]

    def all(self) -> Iterator[Replaced]:
        """Yield what was replaced.

        Raises:
            SourceError: the source cannot be parsed.
            _EditedSinceError: it is not the source of this module any more.
        """
        yield from self._scope(self._names, self._module, "")
        for name, bound in self._names.items():
            if name in seams.namespace(self._module) and name not in self._set_by_functions:
                yield from self._borrowed(name, bound, seams.namespace(self._module)[name])

    @functools.cached_property
    def _names(self) -> Mapping[str, Name]:
        return bindings.scope(self._source.syntax.body)

    @functools.cached_property
    def _set_by_functions(self) -> frozenset[str]:
        return bindings.set_by_functions(self._source.syntax)

    def _borrowed(self, name: str, bound: Name, live: Any) -> Iterator[Replaced]:
        """Yield a name that is imported from another module, and leads to something else than it does there."""
        homes = borrowed.homes(self._module, name, bound, live, self._packages_of_all)
        if not homes or any(seams.namespace(home)[original] is live for home, original in homes):
            return
        if (mark := seam_marks.mark_of(live)) is not None:  # a name that an overlay rebound, and home has lost it since
            yield self._replaced(name, definers.describe(live), mark.overlay_id)
            live = mark.original
        if not any(_made_at_home(home, original, live, self._packages_of_all) for home, original in homes):
            yield self._replaced(name, definers.describe(live))

    def defines(self, name: str, live: Any) -> bool:
        """Return whether an object is what the source gives to a name, though the name may lead to another one now.

        Raises:
            SourceError: the source cannot be parsed.
            _EditedSinceError: it is not the source of this module any more.
        """
        bound = self._names.get(name)
        if name in self._set_by_functions:
            return True
        if bound is None:  # a name of a star import, or of a module below a package
            return definers.definer(live) == self._own
        if bound.classes and issubclass(type(live), type) and self._is_own_class(live, name):
            return True
        if bound.others and all(isinstance(node, ast.ImportFrom) for node in bound.others):
            return not any(each.overlay is None for each in self._borrowed(name, bound, live))
        if bound.others and self._makes(name, bound, seams.namespace(self._module)[name]):
            return False  # what a call makes is the object that the name leads to, and no other
        return self._makes(name, bound, live)

    def _makes(self, name: str, bound: Name, live: Any) -> bool:
        if bound.functions or bound.classes or bound.lambdas:
            return all(each.overlay is not None for each in self._function(bound, live, name, self._module))
        return definers.definer(live) in self._packages(bound.others, self._module)

    def _scope(self, names: Mapping[str, Name], owner: seams.Owner, prefix: str) -> Iterator[Replaced]:
        there = seams.namespace(owner)
        for name, bound in names.items():
            if not bound.functions and not bound.classes and not bound.lambdas:
                continue
            if bound.lambdas and name in self._set_by_functions:
                continue
            symbol = f"{prefix}{name}"
            if name not in there:
                if bound.always and not bound.deleted and not bound.decorators:
                    yield self._replaced(symbol, "nobody: it was deleted")
                continue
            live = there[name]
            if bound.classes and issubclass(type(live), type) and self._is_own_class(live, symbol):
                yield from self._class(bound, live, symbol)
            else:
                yield from self._function(bound, live, symbol, owner)

    def _is_own_class(self, live: type, symbol: str) -> bool:
        return vars(live).get("__module__") == self._module.__name__ and live.__qualname__ == symbol

    def _class(self, bound: Name, live: type, symbol: str) -> Iterator[Replaced]:
        names = bindings.merged([bindings.scope(node.body, node.name) for node in bound.classes])
        yield from self._scope(names, live, f"{symbol}.")
        decorators = [decorator for node in bound.classes for decorator in node.decorator_list]
        # What the source does not define may still be upstream's own: decorators, bases and metaclasses add methods.
        known = {self._own, f"namedtuple_{live.__name__}", *self._packages(decorators, live), *_packages_above(live)}
        for name, raw in vars(live).items():
            function = definers.unwrapped(raw)
            if name in names or not _is_foreign(name, raw, function, live, known):
                continue
            mark = seam_marks.mark_of(raw)
            yield self._replaced(f"{symbol}.{name}", definers.describe(raw), mark.overlay_id if mark else None)

    def _function(self, bound: Name, live: Any, symbol: str, owner: seams.Owner) -> Iterator[Replaced]:
        for part in definers.accessors(live):
            marks, foreign = self._behind(bound, part, symbol, owner)
            for mark in marks:
                yield self._replaced(symbol, definers.describe(mark.made), mark.overlay_id)
            if foreign is not None:
                yield self._replaced(symbol, definers.describe(foreign))

    def _behind(self, bound: Name, live: Any, symbol: str, owner: seams.Owner) -> tuple[list[seam_marks.Mark], Any]:
        """Return our seams on the way to the source's own function, and what else is in it."""
        marks: list[seam_marks.Mark] = []
        layers = 0
        makers = [*bound.decorators, *bound.others]
        if not issubclass(type(live), type):
            makers += [part for node in bound.classes for part in (*node.bases, *node.keywords)]
        explained = self._packages(makers, owner)
        while True:
            if (mark := seam_marks.mark_of(live)) is not None:
                marks.append(mark)
                live = mark.original
                continue
            live = definers.unwrapped(live)
            if type(live) is FunctionType and self._is_at(live, bound, symbol):
                return marks, None
            if any(isinstance(node, ast.Constant) and node.value is live for node in bound.others):
                return marks, None  # None, where a library is missing
            if definers.definer(live) not in explained:
                return marks, live
            if bound.others or _is_metaclass_made(bound, live):  # nobody but the source says what it is
                return marks, None
            layers += 1
            inner = definers.inner(live)
            if layers > bound.wrappers or (inner is None and type(live) is FunctionType):
                return marks, live
            if inner is None:
                return marks, None
            live = inner

    def _is_at(self, function: FunctionType, bound: Name, symbol: str) -> bool:
        code = function.__code__
        if not _same_file(code.co_filename, self._source.path):
            return False
        lines = [*map(bindings.first_line, bound.functions), *(node.lineno for node in bound.lambdas)]
        if code.co_firstlineno in lines:
            return True
        if function.__qualname__ == symbol and code.co_name == symbol.rpartition(".")[2]:
            raise _EditedSinceError(f"{self._module.__name__}: {self._source.path} was edited since it was imported")
        return False

    def _packages(self, nodes: Collection[ast.AST], owner: seams.Owner) -> frozenset[str]:
        """Return the packages of everything that some expressions and imports of the source mention."""
        if not nodes:
            return frozenset()
        found = {self._own}
        for inner in (each for node in nodes for each in ast.walk(node)):
            if isinstance(inner, ast.ImportFrom | ast.Import):
                found.update(_imported(inner))
            elif isinstance(inner, ast.Name | ast.Attribute):
                found.update(definers.packages_of(self._value(inner, owner)))
        return frozenset(found)

    def _value(self, node: ast.expr, owner: seams.Owner) -> Any:
        """Return what a dotted name of the source leads to, without waking a lazy module."""
        if isinstance(node, ast.Name):
            return seams.namespace(owner).get(node.id, seams.namespace(self._module).get(node.id))
        if isinstance(node, ast.Attribute):
            inner = self._value(node.value, owner)
            return None if inner is None else inspect.getattr_static(inner, node.attr, None)
        return None

    def _replaced(self, symbol: str, by: str, overlay: str | None = None) -> Replaced:
        return Replaced(module=self._module.__name__, symbol=symbol, by=by, overlay=overlay)


def _imported(node: ast.ImportFrom | ast.Import) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [(node.module or "").partition(".")[0]] if not node.level else []
    return [alias.name.partition(".")[0] for alias in node.names]


def _packages_above(cls: type) -> Iterator[str]:
    yield from sys.stdlib_module_names
    for base in cls.__mro__[1:]:
        yield definers.definer(base)
        yield definers.definer(type(base))


def _is_metaclass_made(bound: Name, live: Any) -> bool:
    """Return whether a class statement gave something that is no class, as with a stand-in object among its bases."""
    return bool(bound.classes) and not issubclass(type(live), type) and type(live) is not FunctionType


def _is_foreign(name: str, raw: Any, function: Any, live: type, known: Collection[str]) -> bool:
    """Return whether somebody else put a method into a class: any function, or what overrides one of a base."""
    if type(function) is FunctionType:
        return definers.definer(function) not in known
    above = next((vars(base)[name] for base in live.__mro__[1:] if name in vars(base)), None)
    held = definers.method_of(raw)
    if held is None or type(definers.unwrapped(above)) is not FunctionType:
        return False
    # The standard library makes methods that are no functions only where its own classes are the bases.
    ours = {*known} - sys.stdlib_module_names
    return definers.definer(held) not in ours and definers.definer(definers.unwrapped(above)) in ours


def _made_at_home(home: ModuleType, name: str, live: Any, packages: Collection[str]) -> bool:
    source = InstalledTree().module(home.__name__)
    return source is None or _Comparison(home, source, packages).defines(name, live)


_same_file = functools.cache(swapped.same_file)
