"""Snapshots of the names of loaded modules: the functions and classes that were replaced in between, and the code of each replacement.

Two snapshots of one process are compared by identity, so a replacement of equal text counts, too. A snapshot keeps the
objects themselves: an address that is free may be given to another object.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

Snapshot = dict[tuple[str, str], Any]
"""Objects by the name of their module and their name in it, such as `("package.layers", "Router.forward")`."""


class ReplacedName(NamedTuple):
    """One name that leads to another object than before."""

    module: str
    symbol: str
    was: str
    """The object before, by its own module and name; `None` where the module was not loaded yet."""
    now: str
    """The object after, by the module and the name that its code has: a wrapper may have the name of the function that it wraps."""
    place: str
    """The file and line of a function's code; empty for anything else."""
    defined: tuple[str, str]
    """The module and the name in it where the object before is defined: a name may be an import of it."""
    calls_original: bool
    """Whether the new object holds the old one: a wrapper, or a subclass."""


class OverridingClass(NamedTuple):
    """A class of one package that overrides methods of a base class in another."""

    name: str
    base: str
    methods: tuple[str, ...]


def take(packages: Collection[str]) -> Snapshot:
    """Return every function and class of the loaded modules of packages, and every member of a class that can be called."""
    found: Snapshot = {}
    for name, module in _loaded(packages):
        for symbol, value in list(vars(module).items()):
            if _is_dunder(symbol) or not (value is None or callable(value)):
                continue
            found[name, symbol] = value
            if isinstance(value, type) and value.__module__ == name:
                members = {key: each for key, each in list(vars(value).items()) if callable(plain(each))}
                found |= {(name, f"{symbol}.{key}"): each for key, each in members.items()}
    return found


def replaced(before: Snapshot, after: Snapshot, by: str) -> list[ReplacedName]:
    """Return the names that lead to another object than before.

    Args:
        before: the names at first.
        after: the same names later, and those of modules that were loaded in between. Of these a function or class counts
            if it is defined in `by`.
        by: the package that may have replaced names.
    """
    changes = []
    for (module, symbol), now in after.items():
        was = before.get((module, symbol), before)
        if was is before:  # there was no such name
            if is_of(now, by) and not _belongs(module, by):
                changes.append(_replaced(module, symbol, None, now))
        elif not _same(was, now):
            changes.append(_replaced(module, symbol, was, now))
    return changes


def _replaced(module: str, symbol: str, was: Any, now: Any) -> ReplacedName:
    before = plain(was)
    is_named = isinstance(before, type | FunctionType)
    return ReplacedName(
        module,
        symbol,
        was=describe(was),
        now=name_of_code(now),
        place=place(now),
        defined=(before.__module__, before.__qualname__) if is_named else (module, symbol),
        calls_original=holds(now, was),
    )


def overriding(packages: Collection[str], by: str) -> list[OverridingClass]:
    """Return the subclasses of classes of packages that are defined in `by`, each with the methods that it overrides."""
    found = set()
    for _, module in _loaded(packages):
        for base in [each for each in list(vars(module).values()) if isinstance(each, type)]:
            for cls in type.__subclasses__(base):
                own = [key for key, each in vars(cls).items() if callable(plain(each)) and _is_method_of(base, key)]
                if own and is_of(cls, by) and any(_belongs(base.__module__, each) for each in packages):
                    found.add(OverridingClass(describe(cls), describe(base), tuple(sorted(own))))
    return sorted(found)


def plain(value: Any) -> Any:
    """Return the function in a static method, a class method or a property; anything else as it is."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def describe(value: Any) -> str:
    """Return the module and name of a function or class, of another object those of its class."""
    value = plain(value)
    if value is None:
        return "None"
    named = value if isinstance(value, type | FunctionType) else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def name_of_code(value: Any) -> str:
    """Return the module and name under which a function was written, whatever it calls itself; of another object `describe`."""
    function = plain(value)
    if not isinstance(function, FunctionType):
        return describe(value)
    code = function.__code__
    return f"{function.__globals__.get('__name__')}.{getattr(code, 'co_qualname', code.co_name)}"


def place(value: Any) -> str:
    """Return the file and line of a function's code; empty for anything else."""
    function = plain(value)
    if not isinstance(function, FunctionType):
        return ""
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"


def is_of(value: Any, package: str) -> bool:
    """Return whether a function or class is defined in a package."""
    return _belongs(getattr(plain(value), "__module__", None) or "", package)


def holds(now: Any, was: Any) -> bool:
    """Return whether an object holds another: in its closure, its defaults, a global that it names, or as a base class."""
    now, was = plain(now), plain(was)
    if isinstance(now, type) and isinstance(was, type):
        return issubclass(now, was)
    return was is not None and any(plain(each) is was for each in _held(now))


def _held(function: Any) -> Iterator[Any]:
    if isinstance(function, functools.partial):
        yield function.func
    yield getattr(function, "__wrapped__", None)
    if not isinstance(function, FunctionType):
        return
    yield from map(_content, function.__closure__ or ())
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from (function.__globals__.get(name) for name in function.__code__.co_names)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that was never bound
        return None


def _same(was: Any, now: Any) -> bool:
    return was is now or (plain(was) is plain(now) and type(was) is type(now))


def _is_method_of(base: type, name: str) -> bool:
    return name == "__init__" or (not _is_dunder(name) and callable(plain(getattr(base, name, None))))


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _loaded(packages: Collection[str]) -> Iterator[tuple[str, ModuleType]]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and any(_belongs(name, each) for each in packages):
            yield name, module


def _belongs(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
