"""Seams: replacement of an attribute of a module or class, and its exact restoration.

The saved original is the raw attribute from the owner's own `__dict__`. With `getattr`, a staticmethod would be restored as a
plain function, and an inherited method as an override.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from megacpp_overlays.errors import SeamError
from megacpp_overlays.loader.live_names import NOTHING, LiveName, Owner, namespace
from megacpp_overlays.runtime import calls
from megacpp_overlays.runtime.seam_marks import ATTRIBUTE, Mark, mark_behind, mark_of, plain_function, wrapped

_kept: weakref.WeakValueDictionary[tuple[str, int], Any] = weakref.WeakValueDictionary()
"""Replacements that are still referenced, by overlay and original."""


@dataclass(frozen=True, slots=True)
class Seam:
    """One replaced attribute: its place, the original and the replacement."""

    owner: Owner
    name: str
    original: Any
    replacement: Any
    inherited: bool
    adopted: bool = False
    """Whether another session installed and verified it before."""

    def __str__(self) -> str:
        return str(self.place)

    @property
    def place(self) -> LiveName:
        """Its place, as a live name."""
        return LiveName(self.owner, self.name)

    @property
    def function(self) -> Any:
        """The function that callers reach now."""
        return plain_function(self.replacement)

    @property
    def original_function(self) -> Any:
        """The function that callers reached before."""
        return plain_function(self.original)

    @property
    def calls(self) -> int | None:
        """Number of calls in this process; None if it was installed by a copy of this package that does not count calls."""
        return getattr(getattr(mark_of(self.function), "calls", None), "count", None)

    def check_first_call(self, is_refused: Callable[[], bool]) -> None:
        """Set a check that runs before the first call of the seam; a seam of an older copy of this package has none."""
        if not self.adopted and isinstance(found := getattr(mark_of(self.function), "calls", None), calls.Calls):
            found.check = is_refused

    @property
    def in_place(self) -> bool:
        """Whether the attribute is still the replacement."""
        return self.place.own is self.replacement

    def undo(self) -> bool:
        """Restore the original; a second call does nothing.

        Returns:
            False if other code replaced the attribute after the seam was installed. The attribute is left alone then,
            because restoring the original would drop that replacement.
        """
        current = namespace(self.owner).get(self.name, NOTHING)
        if current is self.original or (self.inherited and current is NOTHING):
            return True
        if current is not self.replacement:
            return False
        if self.inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)
        return True

    def taken_by(self) -> str:
        """Return a sentence on the code that has replaced the seam."""
        return f"{self} was replaced after us by {describe(self.place.own)}; not undone"


Note = Callable[[Seam], object]


def unnoted(_: Seam) -> None:
    """Ignore the seam: the default of `note`."""


def replace(
    owner: Owner, name: str, make: Callable[[Any], Any], *, overlay_id: str, module: str = "", note: Note = unnoted
) -> Seam:
    """Replace an attribute with the function that `make` returns for the current one.

    The replacement keeps name, module, documentation and descriptor kind of the original, so that it pickles
    by reference and `inspect.signature` still works. If a seam of the same overlay is there already, alone or under a wrapper that
    leads to it, it is adopted, so that the first original is kept.

    Args:
        owner: module or class.
        name: of the attribute.
        make: returns the replacement of a function.
        overlay_id: the overlay of the seam.
        module: target module of the overlay.
        note: called with the seam before it is installed, so that a seam is known even if an interrupt comes in between.

    Raises:
        SeamError: another overlay holds the attribute, `make` returned no new function, or the owner refuses the assignment.
    """
    place = LiveName(owner, name)
    raw, inherited = place.raw, place.inherited
    if (mark := mark_behind(raw)) is not None:
        if mark.overlay_id != overlay_id:
            raise SeamError(f"{place} is already held by overlay {mark.overlay_id}")
        held = raw if mark_of(raw) is not None else mark.made
        seam = Seam(owner, name, mark.original, held, mark.inherited, adopted=True)
        note(seam)
        return seam
    function = plain_function(raw)
    if not callable(function):
        raise SeamError(f"{place} is no function: {describe(raw)}")
    # A seam that is installed again after `undo` is the same function, because other code may hold it.
    kept = _kept.get((overlay_id, id(function)))
    if kept is not None and kept.__wrapped__ is function:
        made, count = kept, getattr(kept, ATTRIBUTE).calls
        count.count = 0
    else:
        new = make(function)
        if not _is_new(new, function):
            raise SeamError(f"the replacement of {place} is no new function but {describe(new)}")
        made, count = calls.counting(new, function)
    functools.update_wrapper(made, function)
    setattr(made, ATTRIBUTE, Mark(overlay_id, raw, inherited, made, module, count))
    _kept[overlay_id, id(function)] = made
    replacement = _like(raw, made)
    seam = Seam(owner, name, raw, replacement, inherited)
    note(seam)
    try:
        setattr(owner, name, replacement)
    except (AttributeError, TypeError) as error:
        raise SeamError(f"{seam} cannot be replaced: {error}") from error
    return seam


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


def describe(value: Any) -> str:
    """Return the origin of a value, for evidence: `other_lib.patches.fast_forward (patches.py:12)`."""
    function = plain_function(value)
    if type(function) is not FunctionType and not issubclass(type(function), type):
        return _described_by_type(function)  # a proxy may return the attributes of the wrapped object
    module, name = function.__module__, function.__qualname__
    code = getattr(function, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{module}.{name}{where}" if module else f"{name}{where}"


def _described_by_type(value: Any) -> str:
    wrapper = _wrapper_of(value)
    words = _named_by_type(value) if wrapper is None else f"a wrapper with {describe(wrapper)}"
    inner = next((each for each in wrapped(value) if each is not wrapper and type(each) is FunctionType), None)
    return words if inner is None or type(value) is MethodType else f"{words} around {describe(inner)}"


def _named_by_type(value: Any) -> str:
    kind = type(value)
    if kind is BuiltinFunctionType:
        return f"{value.__module__}.{value.__qualname__}"
    return f"an object of {kind.__module__}.{kind.__qualname__}"


def _wrapper_of(value: Any) -> Any:
    """Return the wrapper function of a proxy of wrapt, or the function of a bound method; None for any other value."""
    if type(value) is MethodType:
        return value.__func__
    try:
        return object.__getattribute__(value, "_self_wrapper")
    except Exception:  # noqa: BLE001 - any other object; attribute access may raise
        return None


def identity(value: Any) -> str:
    """Return a name for the code of a value that is the same in every process, independent of its `__name__`."""
    function = plain_function(value)
    if type(function) is FunctionType:
        code = function.__code__
        # `functools.wraps` copies the name and the module of the wrapped function.
        return f"{function.__globals__.get('__name__', '?')}.{getattr(code, 'co_qualname', code.co_name)}"
    if issubclass(type(function), type):
        return f"{function.__module__}.{function.__qualname__}"
    wrapper = _wrapper_of(function)
    return _named_by_type(function) if wrapper is None else f"a wrapper with {identity(wrapper)}"
