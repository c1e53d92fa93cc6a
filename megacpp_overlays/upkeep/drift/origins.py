"""The origin of a live object's code, independent of the object's own name and module attributes.

A patched function often looks like the function that it replaced: `functools.wraps` copies the name and module, and a proxy
returns the attributes of the wrapped object. Types, code objects and globals cannot be copied in this way.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, WrapperDescriptorType
from typing import Any

from megacpp_overlays.loader import live_names

_INNER = ("__wrapped__", "fn", "func", "_torchdynamo_orig_callable", "_init_fn")
"""Attributes in which wrappers of functools, Triton and torch keep the wrapped object."""

_MODULE_OF_TYPE = type.__dict__["__module__"]
"""The descriptor of a type's module, which bypasses metaclasses and also works for types written in C."""


def package_of(module: str) -> str:
    """Return the outermost non-namespace package of a module: `megatron.core` for the modules below it."""
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        loaded = sys.modules.get(name)
        if loaded is not None and issubclass(type(loaded), ModuleType) and live_names.namespace(loaded).get("__file__"):
            return name
    return parts[0]


def is_in(function: FunctionType, package: str) -> bool:
    """Return whether the code of a function is in a file of a package."""
    return any(_is_below(function.__code__.co_filename, folder) for folder in _folders(package))


def _folders(package: str) -> list[str]:
    there = live_names.namespace(sys.modules[package]) if package in sys.modules else {}
    return [str(each) for each in there.get("__path__") or [there.get("__file__")] if each]


@functools.cache
def _is_below(file: str, folder: str) -> bool:
    file, folder = os.path.realpath(file), os.path.realpath(folder)
    return file == folder or file.startswith(f"{folder}{os.sep}")


def accessors(raw: Any) -> tuple[Any, ...]:
    """Return the functions of a property; any other object as it is."""
    if type(raw) is property:
        return tuple(each for each in (raw.fget, raw.fset, raw.fdel) if each is not None)
    return (raw,)


def unwrapped(raw: Any) -> Any:
    """Return the function inside a staticmethod, classmethod, bound method or property; any other object as it is."""
    if issubclass(type(raw), property):
        return raw.fget
    if issubclass(type(raw), staticmethod | classmethod | MethodType):
        return raw.__func__
    return raw.func if issubclass(type(raw), functools.cached_property | functools.partialmethod) else raw


def inner(wrapper: Any) -> Any:
    """Return the wrapped object of a wrapper: from its attributes, or the only callable of its closure; else None."""
    if type(wrapper) is functools.partial:
        return wrapper.func
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


def maker(value: Any) -> str:
    """Return the module whose code created a function, class or object, ignoring attributes that can be copied."""
    if type(value) is FunctionType:
        return str(value.__globals__.get("__name__"))
    if (wrapper := _of_wrapt(value)) is not None:
        return maker(unwrapped(wrapper))
    if type(value) is BuiltinFunctionType or _is_of_nanobind(value):
        return str(value.__module__ or "builtins")  # a method of a built-in type says None
    if issubclass(type(value), type):
        return str(_MODULE_OF_TYPE.__get__(value))
    return str(type(value).__module__)


def _is_of_nanobind(value: Any) -> bool:
    """Return whether a value is a function of a nanobind extension, such as Triton 3.9.0, and not of a Python class of that name."""
    kind = type(value)
    if (kind.__module__, kind.__qualname__) != ("nanobind", "nb_func"):
        return False
    return type(inspect.getattr_static(kind, "__call__", None)) is WrapperDescriptorType


def describe(raw: Any) -> str:
    """Return the definition of a function, class or object as text: `plugin.patches.fast (/src/plugin/patches.py:12)`."""
    value = unwrapped(raw)
    if (wrapper := _of_wrapt(value)) is not None:
        return f"a wrapper of wrapt around it: {describe(wrapper)}"
    if issubclass(type(value), type):
        functions = (unwrapped(each) for each in vars(value).values())
        codes = [each.__code__ for each in functions if type(each) is FunctionType]
        return _place(value.__module__, value.__qualname__, codes[0] if codes else None)
    if type(value) is FunctionType:
        code = value.__code__
        return _place(maker(value), getattr(code, "co_qualname", code.co_name), code)
    if type(value) is BuiltinFunctionType:
        return f"{value.__module__}.{value.__qualname__}"
    call = unwrapped(inspect.getattr_static(type(value), "__call__", None))
    called = call.__code__ if type(call) is FunctionType else None
    return f"an object of {_place(type(value).__module__, type(value).__qualname__, called)}"


def _of_wrapt(value: Any) -> Any:
    """Return the wrapper function of a wrapt proxy, else None; the proxy itself has the name of the wrapped function."""
    if type(value).__module__.partition(".")[0] not in {"wrapt", "_wrappers"}:
        return None
    return getattr(value, "_self_wrapper", None)


def _place(module: str, name: str, code: CodeType | None) -> str:
    return f"{module}.{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else f"{module}.{name}"
