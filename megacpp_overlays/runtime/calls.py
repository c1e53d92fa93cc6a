"""Count the calls of a seam, so that an audit can say whether what is active was ever used.

A count is an addition to a number of this process: no lock, no tensor, nothing that waits. Calls of several threads at the
same instant may count as one.

Before the first call a seam can be checked once more: imports are over by then, and other libraries have put in their own
code. Where the check refuses the seam, the call goes to the original.

What a compiled graph contains is called while it is traced, and not when it runs: Dynamo runs the counting itself, as it
does with what `torch.compiler.assume_constant_result` is given, and puts nothing of it into the graph. So a graph counts
once for each time that it is traced. A CUDA graph counts when it is captured, and not when it is replayed.
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
    """How often one seam was called in this process."""

    __slots__ = ("__weakref__", "check", "count")

    def __init__(self) -> None:
        self.count = 0
        self.check: Callable[[], bool] | None = None
        """Asked before the first call: whether the seam must not be used. It raises only where `strict` asks for it."""
        _all.add(self)

    def note(self) -> bool:
        """Count a call; return whether its check refuses the seam."""
        is_first = not self.count and not getattr(_proofs, "depth", 0)
        is_refused = is_first and self.check is not None and self.check()
        self.count += 1
        return is_refused


_all: weakref.WeakSet[Calls] = weakref.WeakSet()
_proofs = threading.local()
"""`depth`: in how many blocks of `not_counted` this thread is."""


def counting(function: FunctionType, original: Callable[..., Any] | None = None) -> tuple[FunctionType, Calls]:
    """Return a function that counts and calls this one, and the count.

    Args:
        function: the seam.
        original: is called where the check of the count refuses the seam.

    It bears the names and the place of the function: what a traceback, a profiler, and a comparison of ranks look for is
    the seam. Its code is its own, for Dynamo keeps graphs and limits by code.
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
    vars(counted).update(vars(function))  # what its maker wrote on it is asked of what callers reach
    return dynamo.alike(counted, function), calls


def _in_place_of(code: CodeType, other: CodeType) -> CodeType:
    place: dict[str, Any] = {"co_filename": other.co_filename, "co_firstlineno": other.co_firstlineno}
    names = {each: getattr(other, each) for each in ("co_name", "co_qualname") if hasattr(other, each)}
    return code.replace(**place, **names)


@contextlib.contextmanager
def not_counted() -> Iterator[None]:
    """Count no call that is made inside of the block, and check none: self-tests and witnesses are no use of a seam."""
    before = [(each, each.count) for each in list(_all)]
    _proofs.depth = getattr(_proofs, "depth", 0) + 1
    try:
        yield
    finally:
        _proofs.depth -= 1
        for each, count in before:
            each.count = count


def _forget() -> None:
    """Begin at nothing: a forked child has called nothing yet."""
    for each in list(_all):
        each.count = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
