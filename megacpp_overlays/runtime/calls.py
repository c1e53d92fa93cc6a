"""Call counters of seams, so that an audit can report whether an active overlay was ever used.

A count is an increment of an integer of this process: no lock, no tensor, no wait. Calls of several threads at the
same instant may count as one.

Before the first call a seam can be checked once more: imports are over by then, and other libraries have made their own
patches. Where the check refuses the seam, the call goes to the original.

A seam inside of a compiled graph is counted while the graph is traced, and not when it runs: Dynamo runs the counter itself, as it
runs functions under `torch.compiler.assume_constant_result`, and puts nothing of it into the graph. So a graph counts
once for each trace. A CUDA graph counts when it is captured, and not when it is replayed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from megacpp_overlays.runtime import dynamo


class Calls:
    """Number of calls of one seam in this process."""

    __slots__ = ("__weakref__", "check", "count")

    def __init__(self) -> None:
        self.count = 0
        self.check: Callable[[], bool] | None = None
        """Called before the first call: returns whether the seam must not be used. It raises only where `strict` asks for it."""
        _all.add(self)

    def note(self) -> bool:
        """Count a call; return whether its check refuses the seam."""
        is_first = not self.count and not getattr(_proofs, "depth", 0)
        is_refused = is_first and self.check is not None and self.check()
        self.count += 1
        return is_refused


_all: weakref.WeakSet[Calls] = weakref.WeakSet()
_proofs = threading.local()
"""`depth`: the number of nested `not_counted` blocks in this thread."""


def counting(function: FunctionType, original: Callable[..., Any] | None = None) -> tuple[FunctionType, Calls]:
    """Return a function that counts its calls and calls this one, and the count.

    Args:
        function: the seam.
        original: is called where the check of the count refuses the seam.

    The new function has the name, file and line of the seam, so that tracebacks, profilers and comparisons of ranks show the
    seam. It has its own code object, because Dynamo keeps graphs and limits by code object.
    """
    calls, instead = Calls(), original or function

    @dynamo.constant
    def note() -> bool:
        return calls.note()

    # fmt: off
    def count(*args: Any, **kwargs: Any) -> Any: return (instead if note() else function)(*args, **kwargs)
    # fmt: on

    code = _in_place_of(count.__code__, function.__code__)
    counted = FunctionType(code, function.__globals__, function.__name__, None, count.__closure__)
    vars(counted).update(vars(function))  # callers read the attributes of the seam from the counting function
    return dynamo.alike(counted, function), calls


def _in_place_of(code: CodeType, other: CodeType) -> CodeType:
    place: dict[str, Any] = {"co_filename": other.co_filename, "co_firstlineno": other.co_firstlineno}
    names = {each: getattr(other, each) for each in ("co_name", "co_qualname") if hasattr(other, each)}
    return code.replace(**place, **names)


@contextlib.contextmanager
def not_counted() -> Iterator[None]:
    """Neither count nor check calls inside of the block: calls of self-tests and witnesses are no use of a seam."""
    before = [(each, each.count) for each in list(_all)]
    _proofs.depth = getattr(_proofs, "depth", 0) + 1
    try:
        yield
    finally:
        _proofs.depth -= 1
        for each, count in before:
            each.count = count


def _forget() -> None:
    """Reset all counts to zero: a forked child has not called a seam yet."""
    for each in list(_all):
        each.count = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
