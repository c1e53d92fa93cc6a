"""Check that a call of a method that subclasses override still reaches the base's definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megacpp_overlays.runtime.seam_marks import plain_function


def reaches(kind: type, name: str, accepts: Callable[[type, Any], bool]) -> bool:
    """Return whether a call of a method reaches an accepted definition.

    An override is skipped if it calls the method of a base, by `super()` or by the base's name. The result is False for any other
    override, and for one that is hidden behind a decorator.

    Args:
        kind: the class of the instance.
        name: of the method.
        accepts: gets a class that defines the method, and its raw attribute.
    """
    for each in kind.__mro__:
        if name not in vars(each):
            continue
        if accepts(each, vars(each)[name]):
            return True
        if not _calls_a_base(each, name):
            return False
    return False


def _calls_a_base(kind: type, name: str) -> bool:
    code = getattr(plain_function(vars(kind)[name]), "__code__", None)
    names = set() if code is None else {*code.co_names}
    return name in names and bool(names & {"super", *(base.__name__ for base in kind.__mro__[1:])})
