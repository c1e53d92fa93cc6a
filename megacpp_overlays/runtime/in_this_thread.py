"""Replacement of values that a module's code reads, in one thread, while a witness or a self-test runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

_REPLACED = "__megacpp_replaced__"
"""Attribute of a function that `answer` made: the function that any other thread gets."""


def answer(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is ours in the thread that asked for it, and theirs in any other."""
    here = threading.get_ident()

    def answered(*args: Any, **kwargs: Any) -> Any:
        return (ours if threading.get_ident() == here else theirs)(*args, **kwargs)

    setattr(answered, _REPLACED, theirs)
    return answered


class Instead:
    """A view of a module or another object, some of whose attributes are replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __getitem__(self, key: Any) -> Any:
        """Call a replaced `__getitem__`, such as that of a Triton kernel, which launches on a grid."""
        return vars(self).get("__getitem__", self._module.__getitem__)(key)


def upstream_of(value: Any) -> Any:
    """Return the function or module that a witness or self-test has replaced for a while; any other value as it is."""
    if type(value) is Instead:
        return upstream_of(vars(value)["_module"])
    if type(value) is FunctionType and _REPLACED in vars(value):
        return upstream_of(vars(value)[_REPLACED])
    return value
