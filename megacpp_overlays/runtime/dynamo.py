"""Leave no graph of torch.compile behind that was traced through code that is not there any more.

Dynamo inlines what a compiled function calls and guards only some of it. On torch 2.11 a replaced module function,
static method, property and `forward` of an autograd function are noticed, and so is a `backward` whose function has no
`setup_context`. A replaced method, class method, inherited method or `forward` of a module is not, nor is the
`backward` of a function with `setup_context`: without us such a graph goes on with the old code, in silence.

Dynamo does not say what a graph inlined, so all graphs are dropped, and compile again when they are called. This drops
them alone: `torch.compiler.reset` also forgets callbacks, learned dynamic shapes and CUDA graph trees that are not ours.
It happens only when something was compiled, and not for a target that was just imported: no older graph knows it.

What cannot be reached:

- A CUDA graph that was captured by hand replays the kernels that were recorded.
- What torch.export, AOTInductor, `aot_compile` or TorchScript made is a program of its own, with the code that was traced.
- A call that is under way keeps its code to the end, on any thread, and so does a backward pass whose forward has run.
- A thread that enters a compiled function in the instant between the check and the drop is not seen: change overlays
  while other threads are not training.
- `torch.compile(upstream.function)` holds that very function, as every other reference does; see `aliases`.
- What a module compiled of itself while it was still being imported.
- Dynamo's cache on disk (`caching_precompile`, off by default) compares files and not what is loaded, so it brings back
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
    """Return how many graphs Dynamo keeps in this process, one for each frame and set of guards."""
    dynamo = _dynamo()
    try:
        return 0 if dynamo is None else len(_entries(dynamo, _codes(dynamo)))
    except AttributeError:  # a torch that keeps them elsewhere
        return 0


def check() -> None:
    """Check that graphs can be dropped now.

    Raises:
        SeamError: this thread is tracing, or another one is tracing or running what was compiled.
    """
    with _alone():
        pass


@contextlib.contextmanager
def changing(known: int | None = None, *, dropped: Callable[[str], object] | None = None) -> Iterator[None]:
    """Drop graphs that may contain code that is replaced inside of the block, and let no thread compile meanwhile.

    If the block raises, what was compiled inside of it is dropped too: it has what is rolled back.

    Args:
        known: how many graphs there were when the code was new; if there are no more now, none can contain it, and
            nothing is done. None when any graph may contain it.
        dropped: is told in words what was dropped, if anything was.

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
    """Let Dynamo inline a function, or call it as it is, but not compile it as a frame of its own; return it.

    For a seam that passes calls on to an original that breaks the graph, as reads from the host do: the seam would be
    one more frame to break in. Not for a seam that computes, since it would compute uncompiled after a break.
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
    """Return a function that Dynamo is to treat as it treats another one."""
    return only_inlined(function) if other in _only_inlined else function


def constant(function: Function) -> Function:
    """Let Dynamo run a function while it traces the caller, and put its result into the graph; return it.

    As `torch.compiler.assume_constant_result`, which imports Dynamo: five seconds for a process that compiles nothing.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, of positional arguments alone, that Dynamo calls as it is and never traces.

    For a seam that computes much: traced block by block it would make a large and slow graph. Dynamo itself is not
    imported for that, because importing it takes seconds.
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
    """Return whether Dynamo brings back graphs of other processes, which may have run without an overlay."""
    return bool(getattr(sys.modules.get("torch._dynamo.config"), "caching_precompile", False))


def _dynamo() -> Any:
    """Return torch._dynamo, or None where nothing can have been compiled: it is not imported, or not completely."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo if hasattr(dynamo, "reset") else None


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold Dynamo's own lock, so that no other thread compiles."""
    if (dynamo := _dynamo()) is None:
        yield
        return
    lock = dynamo.convert_frame.compile_lock
    if not lock.acquire(blocking=False):  # waiting could be for ever: its owner may be importing what we settle
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
    except AttributeError:  # a torch that keeps them elsewhere: what is public forgets more, but it is right
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
    """Return every code object that Dynamo ever compiled and that still lives."""
    references = [*dynamo.convert_frame.input_codes.seen, *dynamo.convert_frame.output_codes.seen]
    return [code for reference in references if (code := reference()) is not None]


def _entries(dynamo: Any, codes: list[CodeType]) -> list[Any]:
    return [entry for code in codes for entry in dynamo.eval_frame._debug_get_cache_entry_list(code)]  # noqa: SLF001


def _refuse_while_in_use(dynamo: Any) -> None:
    """Refuse while C code that does not expect it holds a graph: a compilation, or a call on another thread.

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
