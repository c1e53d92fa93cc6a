"""Live names: resolution of a dotted symbol to its module or class and its current attribute in the running process.

Only the owner and the name are stored. The attribute is read from the running process at each access, because another library
may have replaced it since. No function here runs code of a lazy module or of a third-party proxy, except `resolve`, which
requires that the attribute can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

from megacpp_overlays.errors import SeamError
from megacpp_overlays.runtime.seam_marks import Mark, mark_behind, plain_function

Owner = ModuleType | type

NOTHING = object()
"""Placeholder for a missing attribute, because None may be the value of one."""


class LiveName(NamedTuple):
    """An attribute of a module or class, as its callers reach it."""

    owner: Owner
    name: str

    def __str__(self) -> str:
        return f"{owner_name(self.owner)}.{self.name}"

    @property
    def own(self) -> Any:
        """The raw attribute in the owner's own namespace; None if it is missing or inherited."""
        return namespace(self.owner).get(self.name)

    @property
    def inherited(self) -> bool:
        """Whether a base class has the attribute, and the owner itself does not."""
        return self.name not in namespace(self.owner)

    @property
    def raw(self) -> Any:
        """The attribute as it is stored, own or inherited: a staticmethod, not the function in it.

        Raises:
            SeamError: it is stored nowhere.
        """
        if (holder := holder_of(self.owner, self.name)) is None:
            raise SeamError(f"{owner_name(self.owner)} has no attribute {self.name}")
        return namespace(holder)[self.name]

    @property
    def function(self) -> Any:
        """The function that callers reach."""
        return plain_function(self.raw)

    @property
    def mark(self) -> Mark | None:
        """The mark of the seam in this place, wrapped or not; None if there is no seam."""
        return mark_behind(self.raw)

    @property
    def original(self) -> Any:
        """The raw attribute, or the original of the seam in its place."""
        raw = self.raw
        return raw if (mark := mark_behind(raw)) is None else mark.original


class ResolvedSymbol(NamedTuple):
    """The result of following a dotted symbol in a module."""

    owner: Any
    """The innermost owner; a third-party object where one is in the place of the module."""
    name: str
    """The part of the symbol to look up in the owner: the last part, or an earlier one that is not a class."""
    path: str
    """The symbol up to that part."""
    is_complete: bool
    """Whether every part before the last is a class."""

    @property
    def own(self) -> Any:
        """The raw attribute in the owner's own namespace, or `NOTHING`."""
        return attributes(self.owner).get(self.name, NOTHING)


def follow(module: Any, symbol: str) -> ResolvedSymbol:
    """Follow a dotted symbol through the classes of a module, or of any object in its place; raises nothing."""
    owner = module
    parts = symbol.split(".")
    for depth, part in enumerate(parts[:-1], 1):
        found = ResolvedSymbol(owner, part, ".".join(parts[:depth]), is_complete=False)
        inner = found.own
        if not is_class(inner):
            return found
        owner = inner
    return ResolvedSymbol(owner, parts[-1], symbol, is_complete=True)


def resolve(module: ModuleType, symbol: str) -> LiveName:
    """Return the live name of a symbol.

    Raises:
        SeamError: a part of the symbol is missing, or a part before the last is not a class.
    """
    found = follow(module, symbol)
    if not found.is_complete:
        raise SeamError(f"{owner_name(found.owner)} has no class {found.name}")
    if not hasattr(found.owner, found.name):
        where = owner_name(found.owner)
        raise SeamError(f"{where} has no attribute {found.name}: a seam replaces an attribute, and adds none")
    return LiveName(found.owner, found.name)


def holder_of(owner: Any, name: str) -> Any:
    """Return the owner itself, or the class that it inherits an attribute from; None if no class has it."""
    owners = owner.__mro__ if is_class(owner) else [owner]
    return next((each for each in owners if name in attributes(each)), None)


def is_class(value: Any) -> bool:
    """Return whether a value is a class by its type; `isinstance` would call code of the value."""
    return issubclass(type(value), type)


def is_module(value: Any) -> bool:
    """Return whether a value is a module by its type."""
    return issubclass(type(value), ModuleType)


def namespace(owner: Owner) -> Mapping[str, Any]:
    """Return the attributes of a module or class; unlike `vars`, this does not wake a lazy module."""
    found: Mapping[str, Any] = vars(owner) if is_class(owner) else object.__getattribute__(owner, "__dict__")
    return found


def attributes(owner: Any) -> Mapping[str, Any]:
    """Return the attributes of a module, a class, or a third-party object in the place of one, which may have none."""
    try:
        return namespace(owner)
    except MemoryError:  # says nothing about the owner
        raise
    except Exception:  # noqa: BLE001 - a third-party object; attribute access may raise
        return {}


def owner_name(owner: Owner) -> str:
    """Return the dotted name of a module or class."""
    if is_module(owner):
        return str(namespace(owner).get("__name__"))  # reading the attribute would execute a lazy module
    return f"{owner.__module__}.{owner.__qualname__}"
