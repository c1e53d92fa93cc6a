"""Rebinding of stale aliases: names that were bound to a function before its seam was installed.

`from m import f` keeps the old function under a name, perhaps a new one. Such names are found by identity, not by
spelling, in the namespaces of loaded modules. Classes that hold the function are rebound, too. Other objects may hold it that
no assignment to a name can change (a partial, a container, an instance, a default argument, a closure); they are reported. So
are instances that were built before a seam was installed on their constructor.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from megacpp_overlays.errors import SeamError
from megacpp_overlays.loader.heap import HeapSnapshot, loaded_modules
from megacpp_overlays.loader.live_names import LiveName, Owner, namespace, owner_name
from megacpp_overlays.loader.seams import Note, Seam, unnoted
from megacpp_overlays.runtime.seam_marks import Mark, mark_of, plain_function

_FROZEN_BY_PYTHON = 10_000
"""Python freezes some hundred objects of its own at start; `gc.freeze()` in a launcher hides hundreds of thousands."""


def snapshot(placed: Sequence[Seam]) -> HeapSnapshot:
    """Return a snapshot of the heap for the originals of seams; seams may be added to the list until its first query."""
    return HeapSnapshot(lambda: [each for seam in placed for each in (seam.original, seam.original_function)])


def rebind(
    placed: Sequence[Seam],
    changed: list[Seam],
    *,
    deep: bool,
    note: Note = unnoted,
    heap: HeapSnapshot | None = None,
) -> None:
    """Rebind the stale aliases of the originals to their replacements.

    Args:
        placed: the seams of one overlay.
        changed: each name is appended before it is changed, so that the caller can undo the changes if a later one fails.
        deep: whether to search classes too, which takes a walk over the heap (tens of milliseconds).
        note: called with each name before it is changed.
        heap: a snapshot shared by overlays that are armed together; None takes one for this call.

    Raises:
        SeamError: an owner does not let a name be assigned.
    """
    heap = heap or snapshot(placed)
    for seam in placed:
        owners = heap.owners(seam.original, seam.original_function) if deep else loaded_modules()
        for owner, name, raw in list(_names_of(seam.original, seam.original_function, owners)):
            if owner is seam.owner and name == seam.name:
                continue
            alias = Seam(owner, name, raw, seam.replacement if raw is seam.original else seam.function, inherited=False)
            note(alias)
            changed.append(alias)
            _assign(alias, alias.replacement)


class MarkedName(NamedTuple):
    """A name in a loaded module that is bound to a seam."""

    owner: ModuleType
    name: str
    value: Any
    mark: Mark


def marked_names() -> list[MarkedName]:
    """Return every name in a loaded module that is bound to a seam, of any execution of the target.

    Seams are recognised by their marks, so the result does not depend on how a name was bound.
    """
    return [
        MarkedName(owner, name, value, mark)
        for owner in loaded_modules()
        for name, value in list(namespace(owner).items())
        # The hot loop of undoing; almost no value is a function with a mark.
        if type(value) in _MARKED and (mark := mark_of(value)) is not None
    ]


def restore(is_ours: Callable[[Mark], bool], names: Sequence[MarkedName] | None = None) -> list[str]:
    """Rebind every module name that is bound to a seam to its original; return a message for each name that cannot be assigned.

    Args:
        is_ours: whether a mark belongs to the overlay that is undone.
        names: the result of `marked_names`, for overlays that are undone together. A name that was bound again since is skipped.
    """
    problems: list[str] = []
    for owner, name, value, mark in marked_names() if names is None else names:
        if is_ours(mark) and namespace(owner).get(name) is value:
            found = as_found(owner, name, value, mark)
            try:
                _assign(found, found.original)
            except SeamError as error:
                problems.append(str(error))
    return problems


_MARKED = frozenset({FunctionType, staticmethod, classmethod, property})


def as_found(owner: Owner, name: str, raw: Any, mark: Mark) -> Seam:
    """Return the seam or the alias that is found under a name, with the original to restore there."""
    held = raw if mark_of(raw) is not None else mark.made
    # A name may hold the plain function of a static method of its class.
    original = mark.original if type(held) is type(mark.original) else plain_function(mark.original)
    bases = owner.__mro__[1:] if mark.inherited and isinstance(owner, type) else ()
    inherited = any(vars(base).get(name) is mark.original for base in bases)
    return Seam(owner, name, original, held, inherited)


def _assign(alias: Seam, value: Any) -> None:
    try:
        setattr(alias.owner, alias.name, value)
    except MemoryError:  # says nothing about the owner
        raise
    except Exception as error:
        raise SeamError(f"{alias} holds the other function and cannot be assigned: {error!r}") from error


def is_held_elsewhere(live: LiveName) -> bool:
    """Return whether anything other than its own name refers to a function, by its reference count, without a heap walk."""
    if live.inherited:
        return False
    raw = live.own
    kind = type(raw) if isinstance(raw, staticmethod | classmethod | property) else None
    del raw  # this reference would count
    alone = type("Alone", (), {live.name: kind(_template()) if kind else _template()})
    return sys.getrefcount(live.function) > sys.getrefcount(LiveName(alone, live.name).function)


def _template() -> Any:
    def function() -> None: ...

    return function


def _names_of(raw: object, function: object, owners: Sequence[Owner]) -> Iterator[tuple[Owner, str, Any]]:
    for owner in owners:
        if _holds(owner, raw, function):
            for name, value in list(namespace(owner).items()):
                if value is raw or value is function:
                    yield owner, name, value


def _holds(owner: Owner, raw: object, function: object) -> bool:
    # The hot loop of an import: a training process has a hundred thousand names, and almost none holds an original.
    for value in list(namespace(owner).values()):  # noqa: SIM110 - any() with a generator takes twice as long
        if value is function or value is raw:
            return True
    return False


def holders(placed: Sequence[Seam], heap: HeapSnapshot | None = None) -> list[str]:
    """Return descriptions of the objects that still refer to the originals after rebinding.

    Local variables of running functions are neither rebound nor reported.

    Args:
        placed: the seams of one overlay, or of several.
        heap: a snapshot shared by overlays that are armed together; None walks over the heap once.
    """
    shared = heap or snapshot(placed)
    if not _found(placed, shared):
        return []
    shared.forget()  # a snapshot keeps its referrers alive
    gc.collect()  # unreachable objects do not count
    return _found(placed, shared)


def _found(placed: Sequence[Seam], heap: HeapSnapshot) -> list[str]:
    found: list[str] = []
    if gc.get_freeze_count() > _FROZEN_BY_PYTHON:
        found.append("objects hidden by gc.freeze()")
    for seam in placed:
        ours = {id(seam.original), *_parts_of(seam.function)}
        found += [
            _words(referrer)
            for referrer in heap.referrers(seam.original_function)
            if id(referrer) not in ours
            and type(referrer).__name__ not in {Seam.__name__, Mark.__name__}  # of any copy of this package
        ]
    return sorted(found)


def built_before(placed: Sequence[Seam]) -> list[str]:
    """Return descriptions of classes with instances that were built before a seam was installed on their constructor."""
    classes = [seam.owner for seam in placed if isinstance(seam.owner, type) and seam.name in {"__init__", "__new__"}]
    if not any(map(_instances, classes)):
        return []
    gc.collect()  # unreachable objects do not count
    counts = {cls: _instances(cls) for cls in classes}
    return [f"{count} of {owner_name(cls)}" for cls, count in counts.items() if count]


def _instances(cls: type) -> int:
    return sum(cls in type(each).__mro__ for each in gc.get_objects())


def _parts_of(function: Any) -> Iterator[int]:
    """Yield the ids of the objects of a seam that may hold its original.

    These are its attributes, where `functools.wraps` keeps the wrapped function, its defaults, its cells, and the same objects
    of each function in a cell.
    """
    waiting, seen = [function], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen or type(each) is not FunctionType:
            continue
        seen.add(id(each))
        yield from map(id, (vars(each), each.__defaults__, each.__kwdefaults__))
        for cell in each.__closure__ or ():
            yield id(cell)
            with contextlib.suppress(ValueError):  # an empty cell
                waiting.append(cell.cell_contents)


def _words(referrer: object) -> str:
    if isinstance(referrer, MethodType):
        return f"a bound method of {type(referrer.__self__).__qualname__}"
    if isinstance(referrer, CellType):
        return "a closure"
    if isinstance(referrer, tuple) and (function := _defaults_of(referrer)) is not None:
        return f"a default argument of {function.__module__}.{function.__qualname__}"
    if isinstance(referrer, dict | list | tuple | set | frozenset):
        return f"a {type(referrer).__qualname__} of {len(referrer)} items"
    return f"an object of {type(referrer).__module__}.{type(referrer).__qualname__}"


def _defaults_of(values: tuple[object, ...]) -> FunctionType | None:
    functions = (each for each in gc.get_referrers(values) if isinstance(each, FunctionType))
    return next((function for function in functions if function.__defaults__ is values), None)
