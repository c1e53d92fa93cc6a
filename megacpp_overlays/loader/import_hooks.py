"""Know when a target module has been executed, whatever the order of events. The one user of wrapt.

Four ways lead to a complete module, and each ends in one call of the listener:

    imported later          wrapt's post-import hook
    imported already        at once
    loaded lazily           when something wakes it; looking at it would be that
    half-imported           when its `__spec__._initializing` turns False; its namespace is unfinished until then
    executed once more      a finder of our own, because wrapt pops its hooks after one firing, so that a reload
                            or a fresh import would lose the seams in silence

This is also the one error boundary. No exception leaves a hook, least of all an ImportError; only
ActivationError does, which `strict` asks for.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any, Protocol

import wrapt

from megacpp_overlays.errors import ActivationError
from megacpp_overlays.source.trees import find_spec, refuse_parents


class Listener(Protocol):
    """Who is told."""

    def loaded(self, name: str, module: ModuleType, *, late: bool) -> None:
        """A watched module is complete. `late`: other code may have run since it was executed."""

    def failed(self, name: str, error: Exception) -> None:
        """The listener itself raised while it dealt with a module. This must not raise."""


class Hooks:
    """Watches modules by name and tells one listener."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._finder = _ReloadFinder(lambda name, module: self.complete(name, module, late=True))
        # The hook of each name that counts. An interrupt may leave another one with wrapt, which is dead then.
        self._hooks: dict[str, Callable[[ModuleType], None]] = {}
        self._watched: set[str] = set()
        self._awaited: set[str] = set()

    def once_imported(self, name: str, then: Callable[[], None]) -> None:
        """Call `then` after the first import of a module, or at once where it is imported; a second call does nothing."""
        if name not in self._awaited:
            self._awaited.add(name)
            wrapt.register_post_import_hook(lambda _: then() if name in self._awaited else None, name)

    def watch(self, name: str) -> None:
        """Tell the listener about every complete execution of a module. Watching twice is watching once."""
        if name in self._watched:
            return
        self._finder.names.add(name)
        if self._finder not in sys.meta_path:
            sys.meta_path.insert(0, self._finder)
        self._register(name)
        self._watched.add(name)

    def close(self) -> None:
        """Watch nothing any more. Hooks that wrapt still holds do nothing when they fire."""
        self._awaited.clear()
        self._watched.clear()
        self._finder.names.clear()
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)

    def complete(self, name: str, module: ModuleType, *, late: bool) -> None:
        """Tell the listener; whatever it raises stays here, except what `strict` asks for."""
        self._finder.executed.add(name)
        try:
            self._listener.loaded(name, module, late=late)
        except ActivationError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary: importing upstream must not fail for us
            self._listener.failed(name, error)

    def _register(self, name: str) -> None:
        # wrapt calls back at once for whatever sits in sys.modules, even if it is still being executed.
        thread, registering = threading.get_ident(), True

        def hook(module: ModuleType) -> None:
            if name in self._finder.names and self._hooks.get(name) is hook:
                self._heard_by_wrapt(name, module, at_once=registering and threading.get_ident() == thread)

        self._hooks[name] = hook
        try:
            wrapt.register_post_import_hook(hook, name)
        finally:
            registering = False

    def _heard_by_wrapt(self, name: str, module: ModuleType, *, at_once: bool) -> None:
        if at_once and is_asleep(module):
            self._finder.executed.add(name)
            _call_after_exec(name, _of(_of(module, "__spec__"), "loader"), self._finder.heard)
        elif at_once and is_initializing(module):
            when_complete(module, lambda: self._resolved(name, module))
        elif not (
            at_once and is_half_imported(module)
        ):  # a recipe that tells nobody when it is done; audits look again
            self.complete(name, module, late=at_once)

    def _resolved(self, name: str, module: ModuleType) -> None:
        """A half-imported module is complete now, or its import failed and it starts afresh."""
        if sys.modules.get(name) is not module:
            self._register(name)
            return
        try:
            self.complete(name, module, late=True)
        except ActivationError:
            del sys.modules[name]  # as for any import that raises: or a second import would succeed in silence
            raise


def is_half_imported(module: object) -> bool:
    """Return whether a module is not executed to its end: the import system or a recipe is at it, or it is asleep."""
    return is_asleep(module) or is_initializing(module) or is_a_shell(module) or _is_being_executed(module)


def is_initializing(module: object) -> bool:
    """Return whether the import system is executing a module."""
    return bool(_of(_of(module, "__spec__"), "_initializing"))


def unfinished_imports(module: ModuleType) -> list[str]:
    """Return the modules that a module refers to and that are still being executed, without the packages around it.

    A function of the module that calls into one of them may fail until that import is over.
    """
    values = list(object.__getattribute__(module, "__dict__").values())
    names = {
        str(_of(each, "__name__")) for each in values if issubclass(type(each), ModuleType) and is_initializing(each)
    }
    return sorted(name for name in names if not f"{module.__name__}.".startswith(f"{name}."))


def is_asleep(module: object) -> bool:
    """Return whether a module is loaded lazily and has not been executed: the first look at an attribute does that."""
    return type(module).__name__ == "_LazyModule" and type(module).__module__ == "importlib.util"


_OF_A_SHELL = {"__name__", "__doc__", "__package__", "__loader__", "__spec__", "__file__", "__cached__", "__path__"}
"""What a module has before anything was executed in it; executing adds `__builtins__`, whatever is in the text."""


def is_a_shell(module: object) -> bool:
    """Return whether nothing was executed in a module yet: a recipe put it in its place, and is to fill it."""
    return type(module) is ModuleType and vars(module).keys() <= _OF_A_SHELL


def _is_being_executed(module: object) -> bool:
    """Return whether a thread is in the body of a module, whoever executes it."""
    body = _of(module, "__dict__")
    for frame in sys._current_frames().values():  # noqa: SLF001 - documented, in spite of its name
        each: FrameType | None = frame
        while each is not None:
            if each.f_code.co_name == "<module>" and (each.f_globals is body or each.f_locals is body):
                return True
            each = each.f_back
    return False


def _of(thing: Any, name: str) -> Any:
    """Return an attribute of a module or a spec without a word to whatever stands in its place, or None."""
    try:
        return object.__getattribute__(thing, name)
    except Exception:  # noqa: BLE001 - somebody's object, which is none of ours
        return None


_WAITING = "_megacpp_overlays_waiting"


def when_complete(module: ModuleType, then: Callable[[], None]) -> None:
    """Call `then` at the moment the import system declares a half-imported module complete.

    The import system announces it by setting `spec._initializing` to False, after the last line of the module
    and before any other thread may go on with it. Giving the spec a class of ours turns that into a call.
    """
    spec: Any = module.__spec__
    spec.__dict__.setdefault(_WAITING, []).append(then)
    if not hasattr(type(spec), "_initializing"):
        spec.__class__ = _watched(type(spec))
    if not is_initializing(module):  # another thread finished it just before the line above
        _tell(spec)


def _watched(kind: type) -> type:
    class WatchedSpec(kind):  # type: ignore[misc]  # the class of a spec is only known here
        """A spec that tells when its module is complete."""

        @property
        def _initializing(self) -> bool:
            return bool(self.__dict__.get("_initializing", False))

        @_initializing.setter
        def _initializing(self, value: bool) -> None:
            self.__dict__["_initializing"] = value
            if not value:
                self.__class__ = kind
                _tell(self)

    return WatchedSpec


def _tell(spec: Any) -> None:
    waiting = spec.__dict__.get(_WAITING, [])
    try:
        while waiting:
            waiting.pop(0)()
    finally:
        if waiting:  # one of them raised what `strict` asks for; the others are told all the same
            _tell(spec)


class _ReloadFinder:
    """A meta-path finder that notices when a module that was executed once is executed again."""

    def __init__(self, heard: Callable[[str, ModuleType], None]) -> None:
        self.names: set[str] = set()
        self.executed: set[str] = set()
        """Modules that were executed, or are to be: wrapt's hook serves the first time."""
        self.heard = heard
        self._searching = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the other finders give, with a loader that calls back after executing."""
        refuse_parents(name)
        if (own := _loaded_before(name)) is not None:
            return own
        if name not in self.names or name not in self.executed or getattr(self._searching, "active", False):
            return None
        self._searching.active = True
        try:
            spec = find_spec(name, path, target, but=self)
        finally:
            self._searching.active = False
        if spec is not None and spec.loader is not None:
            _call_after_exec(name, spec.loader, self.heard)
        return spec


_PACKAGE = __name__.partition(".")[0]


def _loaded_before(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return a spec that leads to a module of this package that somebody took out of `sys.modules`, or None.

    A second copy of it would know no decision and no seam of the first, and have other classes.
    """
    if not name.startswith(_PACKAGE) or name in sys.modules:
        return None
    first, *path = name.split(".")
    found = vars(sys).get(f"_{first}")
    for depth, part in enumerate(path, 1):
        found = vars(found).get(part) if isinstance(found, ModuleType) else None
        if getattr(found, "__name__", None) != ".".join([first, *path[:depth]]):
            return None
    again: Any = _Again(found) if isinstance(found, ModuleType) else None
    return None if again is None else importlib.machinery.ModuleSpec(name, again)


class _Again:
    """A loader that gives a module which is loaded, and executes nothing."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, _: object) -> ModuleType:
        """Return the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Leave it as it is."""
        module.__spec__ = self._spec


def _call_after_exec(name: str, loader: Any, heard: Callable[[str, ModuleType], None]) -> None:
    # An attribute of this one loader, not a wrapper around it: its type and its other methods stay upstream's.
    original = getattr(loader, "exec_module", None)
    if original is None:
        return

    def exec_module(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)
        original(module)
        if _of(module, "__name__") == name:  # some loaders serve many modules
            heard(name, module)

    with contextlib.suppress(AttributeError):  # a loader with slots; the audit finds the module without a seam
        loader.exec_module = exec_module
