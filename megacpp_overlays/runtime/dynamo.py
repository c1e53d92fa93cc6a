"""Invalidation of graphs of torch.compile that were traced through replaced code.

Dynamo inlines the callees of a compiled function and guards only some of them. On torch 2.11 it notices a replaced module
function, static method, property, `forward` of an autograd function, and `backward` of a function without `setup_context`.
It does not notice a replaced method, class method, inherited method, `forward` of a module, or `backward` of a function with
`setup_context`: without this module such a graph silently goes on with the old code.

Dynamo does not list the code that a graph inlined, so all graphs are dropped, and compile again when they are called. Nothing else is
dropped: `torch.compiler.reset` also forgets callbacks, learned dynamic shapes and CUDA graph trees of other code.
Graphs are dropped only when something was compiled, and not for a target that was just imported: no older graph contains it.

Limits:

- A CUDA graph that was captured by hand replays the kernels that were recorded.
- A product of torch.export, AOTInductor, `aot_compile` or TorchScript is a separate program, with the code that was traced.
- A call that is under way keeps its code to the end, on any thread, and so does a backward pass whose forward has run.
- A thread that enters a compiled function between the check and the drop is not detected: change overlays
  while other threads are not training.
- `torch.compile(upstream.function)` holds the original function, as every other reference does; see `aliases`.
- Functions that a module compiled while it was still being imported are not reached.
- Dynamo's cache on disk (`caching_precompile`, off by default) compares files and not loaded code, so it brings back
  graphs of a process without the overlay. The audit calls it a conflict. The caches of Inductor and AOTAutograd are
  keyed by the traced graph; they are right by construction.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeVar

from megacpp_overlays.errors import SeamError

Function = TypeVar("Function", bound=Callable[..., Any])

_only_inlined: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()

_HERE = (
    "torch.compile is tracing on this thread, and the graph it makes could not be dropped: import the target, arm and "
    "undo outside of compiled functions"
)
_ELSEWHERE = (
    "another thread is inside of torch.compile, which does not survive that its graphs are dropped: import the target "
    "and arm before threads compile, or try again when they are done"
)


def graphs() -> int:
    """Return the number of graphs that Dynamo keeps in this process, one for each frame and set of guards."""
    dynamo = _dynamo()
    try:
        return 0 if dynamo is None else len(_entries(dynamo, _codes(dynamo)))
    except AttributeError:  # a torch that keeps them elsewhere
        return 0


def check() -> None:
    """Check that graphs can be dropped now.

    Raises:
        SeamError: this thread is tracing, or another thread is tracing or running a compiled graph.
    """
    with _alone():
        pass


@contextlib.contextmanager
def changing(known: int | None = None, *, dropped: Callable[[str], object] | None = None) -> Iterator[None]:
    """Drop graphs that may contain code replaced inside of the block, and keep other threads from compiling meanwhile.

    If the block raises, graphs compiled inside of it are dropped too: they contain code that is rolled back.

    Args:
        known: number of graphs when the code was new. If there are no more now, no graph can contain the code, and
            none is dropped. None when any graph may contain it.
        dropped: is called with a description of the dropped graphs, if there were any.

    Raises:
        SeamError: as for `check`; nothing was changed.
    """
    may_be_in_one = known is None or graphs() > known
    with _alone() if may_be_in_one else contextlib.nullcontext():
        if may_be_in_one:
            _drop(dropped)
        before = graphs()
        try:
            yield
        except BaseException:
            if graphs() > before:
                with contextlib.suppress(SeamError), _alone():  # the error of the block says more
                    _drop(dropped)
            raise


def only_inlined(function: Function) -> Function:
    """Return a function marked so that Dynamo inlines it, or calls it uncompiled, but never compiles it as its own frame.

    For a seam that passes calls on to an original that breaks the graph, as reads from the host do: the seam would be
    one more frame to break in. Not for a seam that computes, since it would run uncompiled after a break.
    """
    _only_inlined.add(function)
    runner: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    if hasattr(runner, "skip_code"):  # torch 2.4 and 2.5
        runner.skip_code(function.__code__)
    elif hasattr(runner, "set_code_exec_strategy"):
        action = runner._FrameAction  # noqa: SLF001
        runner.set_code_exec_strategy(function.__code__, runner._FrameExecStrategy(action.SKIP, action.DEFAULT))  # noqa: SLF001
    return function


def alike(function: Function, other: Callable[..., Any]) -> Function:
    """Return a function, marked `only_inlined` if the other one is."""
    return only_inlined(function) if other in _only_inlined else function


def constant(function: Function) -> Function:
    """Return a function marked so that Dynamo runs it while tracing the caller and puts its result into the graph.

    Does the same as `torch.compiler.assume_constant_result`, which imports Dynamo: five seconds for a process that compiles nothing.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of positional arguments that Dynamo calls uncompiled and never traces.

    For a seam that computes much: traced block by block it would make a large and slow graph. Dynamo is not
    imported here, because the import takes seconds.
    """
    hidden: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        if (dynamo := sys.modules.get("torch._dynamo")) is None:
            return function(*args)
        if not hidden:
            hidden.append(dynamo.disable(function))
        return hidden[0](*args)

    return only_inlined(call)


def come_from_disk() -> bool:
    """Return whether Dynamo loads graphs of other processes from disk. Those may have run without an overlay."""
    return bool(getattr(sys.modules.get("torch._dynamo.config"), "caching_precompile", False))


def _dynamo() -> Any:
    """Return torch._dynamo, or None if its import has not completed, so that nothing can have been compiled."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo if hasattr(dynamo, "reset") else None


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold Dynamo's compile lock, so that no other thread compiles."""
    if (dynamo := _dynamo()) is None:
        yield
        return
    lock = dynamo.convert_frame.compile_lock
    if not lock.acquire(blocking=False):  # never wait: the owner may be importing the target that is being decided
        raise SeamError(_ELSEWHERE)
    try:
        _refuse_while_in_use(dynamo)
        yield
    finally:
        lock.release()


def _drop(dropped: Callable[[str], object] | None) -> None:
    if (dynamo := _dynamo()) is None:
        return
    try:
        codes = _codes(dynamo)
        entries = _entries(dynamo, codes)
        dropping = map(dynamo.eval_frame.reset_code, codes)
    except AttributeError:  # a torch that keeps them elsewhere: the public reset forgets more, but is correct
        words = "all compiled graphs"
        dynamo.reset()
    else:
        words = f"{len(entries)} compiled graph{'' if len(entries) == 1 else 's'}" if entries else ""
        # Held until all are dropped: their finalizers are Python, and would let other threads run in between.
        held = [(entry.code, getattr(entry, "guard_manager", None)) for entry in entries]
        _refuse_while_in_use(dynamo)
        list(dropping)  # one call of C, so no other thread runs until it is done
        del held
    if words and dropped is not None:
        dropped(words)


def _codes(dynamo: Any) -> list[CodeType]:
    """Return every live code object that Dynamo compiled."""
    references = [*dynamo.convert_frame.input_codes.seen, *dynamo.convert_frame.output_codes.seen]
    return [code for reference in references if (code := reference()) is not None]


def _entries(dynamo: Any, codes: list[CodeType]) -> list[Any]:
    return [entry for code in codes for entry in dynamo.eval_frame._debug_get_cache_entry_list(code)]  # noqa: SLF001


def _refuse_while_in_use(dynamo: Any) -> None:
    """Raise SeamError while C code may use a graph: a compilation is in progress, or another thread runs a graph.

    A call on this thread is safe: it is in Python now, and holds the code that it runs.
    """
    compiling, running = vars(dynamo.convert_frame), vars(dynamo.eval_frame)
    here = threading.get_ident()
    for thread, frame in sys._current_frames().items():  # noqa: SLF001 - documented, in spite of its name
        each: FrameType | None = frame
        while each is not None:
            if each.f_globals is compiling or (each.f_globals is running and thread != here):
                raise SeamError(_HERE if thread == here else _ELSEWHERE)
            each = each.f_back
