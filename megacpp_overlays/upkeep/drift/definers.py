"""Where the code of a live object comes from, whatever the object says of itself.

A patched function likes to look like the one that it replaced: `functools.wraps` copies its name and module, and a proxy
answers with the attributes of what it wraps. Types, code objects and globals cannot be borrowed so.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from megacpp_overlays.loader import seams

_DEEPEST = 32
_INNER = ("__wrapped__", "fn", "func", "_torchdynamo_orig_callable", "_init_fn")
"""Where wrappers of functools, Triton and torch keep what they wrap."""


def packages_of(value: Any) -> Iterator[str]:
    """Yield the packages that a decorator, a base or a function may put into what it makes."""
    for _ in range(_DEEPEST):
        if type(value) is not functools.partial:
            break
        value = value.func
    if issubclass(type(value), ModuleType):
        yield str(seams.namespace(value).get("__name__")).partition(".")[0]
    elif value is not None:
        yield definer(value)
        yield str(inspect.getattr_static(value, "__module__", "")).partition(".")[0]


def method_of(raw: Any) -> Any:
    """Return what is called for a method that is no function: what a partial holds, or the object; else None."""
    value = unwrapped(raw)
    for _ in range(_DEEPEST):
        if type(value) not in {functools.partial, functools.partialmethod}:
            break
        value = value.func
    return value if callable(value) and not issubclass(type(value), type) else None


def accessors(raw: Any) -> tuple[Any, ...]:
    """Return the functions that a property holds; anything else as it is."""
    if type(raw) is property:
        return tuple(each for each in (raw.fget, raw.fset, raw.fdel) if each is not None)
    return (raw,)


def unwrapped(raw: Any) -> Any:
    """Return the function inside a staticmethod, classmethod, bound method or property; anything else as it is."""
    if issubclass(type(raw), property):
        return raw.fget
    if issubclass(type(raw), staticmethod | classmethod | MethodType):
        return raw.__func__
    return raw.func if issubclass(type(raw), functools.cached_property) else raw


def inner(wrapper: Any) -> Any:
    """Return what a wrapper leads to: by its own account, or the one callable of its closure; else None."""
    try:
        kept = object.__getattribute__(wrapper, "__dict__")
    except AttributeError:
        kept = {}
    for name in _INNER:
        if (found := kept.get(name)) is not None:
            return found
    cells = wrapper.__closure__ or () if type(wrapper) is FunctionType else ()
    held = [each for each in map(_content, cells) if callable(each)]
    return held[0] if len(held) == 1 else None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def definer(value: Any) -> str:
    """Return the package whose code made a function, or a class or object: not what it says of itself."""
    if type(value) is FunctionType:
        return str(value.__globals__.get("__name__")).partition(".")[0]
    if type(value) is BuiltinFunctionType:
        return str(value.__module__).partition(".")[0]
    if issubclass(type(value), type):
        return str(inspect.getattr_static(value, "__module__", None)).partition(".")[0]
    return type(value).__module__.partition(".")[0]


def describe(raw: Any) -> str:
    """Return where a function, class or object is defined: `plugin.patches.fast (/src/plugin/patches.py:12)`."""
    value = unwrapped(raw)
    if type(value) is functools.partial:
        return f"a partial of {describe(value.func)}"
    if (wrapper := _of_wrapt(value)) is not None:
        return f"a wrapper of wrapt around it: {describe(wrapper)}"
    if issubclass(type(value), type):
        functions = (unwrapped(each) for each in vars(value).values())
        codes = [each.__code__ for each in functions if type(each) is FunctionType]
        return _place(value.__module__, value.__qualname__, codes[0] if codes else None)
    if type(value) is FunctionType:
        code = value.__code__
        return _place(str(value.__globals__.get("__name__")), getattr(code, "co_qualname", code.co_name), code)
    if type(value) is BuiltinFunctionType:
        return f"{value.__module__}.{value.__qualname__}"
    call = unwrapped(inspect.getattr_static(type(value), "__call__", None))
    place = _place(
        type(value).__module__, type(value).__qualname__, call.__code__ if type(call) is FunctionType else None
    )
    return f"an object of {place}"


def _of_wrapt(value: Any) -> Any:
    """Return the function that somebody gave to wrapt; the proxy itself has the name of what it wraps."""
    if type(value).__module__.partition(".")[0] not in {"wrapt", "_wrappers"}:
        return None
    return getattr(value, "_self_wrapper", None)


def _place(module: str, name: str, code: Any) -> str:
    return f"{module}.{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else f"{module}.{name}"
