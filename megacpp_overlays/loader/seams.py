"""Replace an attribute, and put back exactly what was there.

What is saved is the raw attribute from the owner's own `__dict__`: a staticmethod read with `getattr`
would come back as a plain function, and an inherited method would come back as an override.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from megacpp_overlays.errors import SeamError
from megacpp_overlays.runtime.seam_marks import ATTRIBUTE, Mark, mark_of, plain_function

Owner = ModuleType | type

_ABSENT = object()
_kept: dict[tuple[str, int], Any] = {}


@dataclass(frozen=True, slots=True)
class Seam:
    """One attribute replacement: where, what was there, what is there now."""

    owner: Owner
    name: str
    original: Any
    replacement: Any
    inherited: bool
    adopted: bool = False
    """Whether it was there already, put in and verified by another session."""

    def __str__(self) -> str:
        return f"{owner_name(self.owner)}.{self.name}"

    @property
    def function(self) -> Any:
        """The function that callers reach now."""
        return plain_function(self.replacement)

    @property
    def original_function(self) -> Any:
        """The function that callers reached before."""
        return plain_function(self.original)

    @property
    def in_place(self) -> bool:
        """Whether the attribute still is ours."""
        return namespace(self.owner).get(self.name) is self.replacement

    @property
    def current(self) -> Any:
        """The attribute as it is now."""
        return namespace(self.owner).get(self.name)

    @property
    def is_wrapped(self) -> bool:
        """Whether what is there now still leads to ours, by its own account."""
        outer = plain_function(self.current)
        for _ in range(16):
            outer = getattr(outer, "__wrapped__", None)
            if outer is self.function:
                return True
        return False

    def undo(self) -> bool:
        """Put the original back; a second undo does nothing.

        Returns:
            False when somebody replaced the attribute after us. It is left alone then: putting the original
            back would drop what they installed.
        """
        current = namespace(self.owner).get(self.name, _ABSENT)
        if current is self.original or (self.inherited and current is _ABSENT):
            return True
        if current is not self.replacement:
            return False
        if self.inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)
        return True

    def taken_by(self) -> str:
        """Return in words who holds the attribute now."""
        return f"{self} was replaced after us by {describe(self.current)}; not undone"


def resolve(module: ModuleType, symbol: str) -> tuple[Owner, str]:
    """Return the owner of a symbol and the last part of its name.

    Raises:
        SeamError: a part of the name is missing or is neither a module nor a class.
    """
    owner: Owner = module
    *path, name = symbol.split(".")
    for part in path:
        inner = namespace(owner).get(part, _ABSENT)
        if not isinstance(inner, type):
            raise SeamError(f"{owner_name(owner)} has no class {part}")
        owner = inner
    if not hasattr(owner, name):
        raise SeamError(f"{owner_name(owner)} has no attribute {name}")
    return owner, name


def raw_attribute(owner: Owner, name: str) -> tuple[Any, bool]:
    """Return an attribute as its owner stores it, and whether it is inherited."""
    if name in namespace(owner):
        return namespace(owner)[name], False
    for base in owner.__mro__ if isinstance(owner, type) else ():
        if name in vars(base):
            return vars(base)[name], True
    raise SeamError(f"{owner_name(owner)} has no attribute {name}")


def namespace(owner: Owner) -> Mapping[str, Any]:
    """Return the attributes of a module or class; unlike `vars`, this does not wake a lazy module."""
    is_class = issubclass(type(owner), type)  # isinstance() asks the object itself
    found: Mapping[str, Any] = vars(owner) if is_class else object.__getattribute__(owner, "__dict__")
    return found


def replace(owner: Owner, name: str, make: Callable[[Any], Any], *, overlay_id: str) -> Seam:
    """Replace an attribute with what `make` returns for the function that is there.

    The replacement keeps name, module, documentation and descriptor kind of the original, so that it pickles
    by reference and `inspect.signature` still answers. If our own seam is there already, it is adopted, so
    that the first original is kept.

    Raises:
        SeamError: another overlay holds the attribute, `make` returned nothing new, or the owner refuses.
    """
    raw, inherited = raw_attribute(owner, name)
    if (mark := mark_of(raw)) is not None:
        if mark.overlay_id != overlay_id:
            raise SeamError(f"{owner_name(owner)}.{name} is already held by overlay {mark.overlay_id}")
        return Seam(owner, name, mark.original, raw, mark.inherited, adopted=True)
    function = plain_function(raw)
    if not callable(function):
        raise SeamError(f"{owner_name(owner)}.{name} is no function: {describe(raw)}")
    # Undone and put in again, it is the same function: somebody may hold it.
    kept = _kept.get((overlay_id, id(function)))
    made = kept if kept is not None and kept.__wrapped__ is function else None
    if made is None:
        made = make(function)
        if not _is_new(made, function):
            raise SeamError(f"the replacement of {owner_name(owner)}.{name} is no new function but {describe(made)}")
    functools.update_wrapper(made, function)
    setattr(made, ATTRIBUTE, Mark(overlay_id, raw, inherited, made))
    _kept[overlay_id, id(function)] = made
    replacement = _like(raw, made)
    try:
        setattr(owner, name, replacement)
    except (AttributeError, TypeError) as error:
        raise SeamError(f"{owner_name(owner)}.{name} cannot be replaced: {error}") from error
    return Seam(owner, name, raw, replacement, inherited)


def _is_new(made: Any, function: Any) -> bool:
    """Return whether a function was made for this seam: marking upstream's own would damage it."""
    if type(made) is not FunctionType or made is function or ATTRIBUTE in vars(made):
        return False
    if "__wrapped__" in vars(made):
        return vars(made)["__wrapped__"] is function
    return made.__code__.co_filename != getattr(getattr(function, "__code__", None), "co_filename", None)


def _like(raw: Any, function: Callable[..., Any]) -> Any:
    if isinstance(raw, staticmethod):
        return staticmethod(function)
    if isinstance(raw, classmethod):
        return classmethod(function)
    if isinstance(raw, property):
        return property(function, raw.fset, raw.fdel, raw.__doc__)
    return function


def owner_name(owner: Owner) -> str:
    """Return the dotted name of a module or class."""
    if isinstance(owner, ModuleType):
        return owner.__name__
    return f"{owner.__module__}.{owner.__qualname__}"


def describe(value: Any) -> str:
    """Return where a value comes from, for evidence: `other_lib.patches.fast_forward (patches.py:12)`."""
    function = plain_function(value)
    code = getattr(function, "__code__", None)
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{module}.{name}{where}" if module else f"{name}{where}"
