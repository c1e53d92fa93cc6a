"""Import hooks: call a listener after each complete execution of a target module. The only user of wrapt.

A module can become complete in five ways. Each ends in one call of the listener:

    imported later          wrapt's post-import hook
    imported already        at once
    loaded lazily           when other code first reads an attribute; the hook must not read one, which would execute it
    half-imported           when its `__spec__._initializing` turns False; its namespace is unfinished until then
    executed once more      a meta-path finder of this module: wrapt pops a hook after one firing, so without the finder a
                            reload or a fresh import would silently lose the seams

This module is also the only error boundary. A hook catches every exception, ImportError above all, and lets only
ActivationError through, which `strict` asks for.
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
    """Callbacks of import hooks."""

    def loaded(self, name: str, module: ModuleType, *, late: bool) -> None:
        """Handle a watched module that is complete. `late`: other code may have run since it was executed."""

    def failed(self, name: str, error: Exception) -> None:
        """Handle an exception of `loaded`. This must not raise."""


class Hooks:
    """Import hooks for modules by name, with one listener."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._finder = _ReloadFinder(lambda name, module: self.complete(name, module, late=True))
        # The valid hook of each name. An interrupt may leave another one registered with wrapt, which does nothing then.
        self._hooks: dict[str, Callable[[ModuleType], None]] = {}
        self._watched: set[str] = set()
        self._awaited: set[str] = set()

    def once_imported(self, name: str, then: Callable[[], None]) -> None:
        """Call `then` after the first import of a module, or at once if it is imported; a second call does nothing."""
        if name not in self._awaited:
            self._awaited.add(name)
            wrapt.register_post_import_hook(lambda _: then() if name in self._awaited else None, name)

    def watch(self, name: str) -> None:
        """Call the listener after every complete execution of a module; a second call for a name has no effect."""
        if name in self._watched:
            return
        self._finder.names.add(name)
        if self._finder not in sys.meta_path:
            sys.meta_path.insert(0, self._finder)
        self._register(name)
        self._watched.add(name)

    def close(self) -> None:
        """Stop watching all modules. Hooks that wrapt still holds do nothing when they fire."""
        self._awaited.clear()
        self._watched.clear()
        self._finder.names.clear()
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)

    def complete(self, name: str, module: ModuleType, *, late: bool) -> None:
        """Call the listener; catch every exception of it, except ActivationError, which `strict` asks for."""
        self._finder.executed.add(name)
        try:
            self._listener.loaded(name, module, late=late)
        except ActivationError:
            raise
        except Exception as error:  # noqa: BLE001 - the error boundary: a hook must not break the import of upstream
            self._listener.failed(name, error)

    def _register(self, name: str) -> None:
        # wrapt calls back at once for a module in sys.modules, even if it is still being executed.
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
        # a recipe without a completion event; audits check the module again
        elif not (at_once and is_half_imported(module)):
            self.complete(name, module, late=at_once)

    def _resolved(self, name: str, module: ModuleType) -> None:
        """Handle the end of a half import: the module is complete, or its import failed and is watched again."""
        if sys.modules.get(name) is not module:
            self._register(name)
            return
        try:
            self.complete(name, module, late=True)
        except ActivationError:
            del sys.modules[name]  # as for any import that raises; else a second import would succeed silently
            raise


def is_half_imported(module: object) -> bool:
    """Return whether a module is not fully executed: the import system or a recipe is executing it, or it is lazy and unread."""
    return is_asleep(module) or is_initializing(module) or is_a_shell(module) or _is_being_executed(module)


def is_initializing(module: object) -> bool:
    """Return whether the import system is executing a module."""
    return bool(_of(_of(module, "__spec__"), "_initializing"))


def unfinished_imports(module: ModuleType) -> list[str]:
    """Return the modules that a module refers to and that are still being executed, without its parent packages.

    A function of the module that calls into one of them may fail until that import is complete.
    """
    values = list(object.__getattribute__(module, "__dict__").values())
    names = {
        str(_of(each, "__name__")) for each in values if issubclass(type(each), ModuleType) and is_initializing(each)
    }
    return sorted(name for name in names if not f"{module.__name__}.".startswith(f"{name}."))


def is_asleep(module: object) -> bool:
    """Return whether a module is loaded lazily and not executed yet; the first access to an attribute executes it."""
    return type(module).__name__ == "_LazyModule" and type(module).__module__ == "importlib.util"


_OF_A_SHELL = {"__name__", "__doc__", "__package__", "__loader__", "__spec__", "__file__", "__cached__", "__path__"}
"""Names of a module before its execution. Every execution adds `__builtins__`, also that of an empty text."""


def is_a_shell(module: object) -> bool:
    """Return whether a module is an unexecuted shell: a recipe has put it into `sys.modules` and has yet to fill it."""
    return type(module) is ModuleType and vars(module).keys() <= _OF_A_SHELL


def _is_being_executed(module: object) -> bool:
    """Return whether any thread is executing the body of a module, by the import system or by other code."""
    body = _of(module, "__dict__")
    for frame in sys._current_frames().values():  # noqa: SLF001 - documented, in spite of its name
        each: FrameType | None = frame
        while each is not None:
            if each.f_code.co_name == "<module>" and (each.f_globals is body or each.f_locals is body):
                return True
            each = each.f_back
    return False


def _of(thing: Any, name: str) -> Any:
    """Return an attribute of a module or a spec, or None, without calling code of a third-party object in its place."""
    try:
        return object.__getattribute__(thing, name)
    except Exception:  # noqa: BLE001 - third-party object; attribute access may raise
        return None


_WAITING = "_megacpp_overlays_waiting"


def when_complete(module: ModuleType, then: Callable[[], None]) -> None:
    """Call `then` at the moment the import system declares a half-imported module complete.

    The import system announces it by setting `spec._initializing` to False, after the last line of the module
    and before any other thread may go on with it. The class of the spec is replaced by one that turns this into a call.
    """
    spec: Any = module.__spec__
    spec.__dict__.setdefault(_WAITING, []).append(then)
    if not hasattr(type(spec), "_initializing"):
        spec.__class__ = _watched(type(spec))
    if not is_initializing(module):  # another thread finished it just before the line above
        _tell(spec)


def _watched(kind: type) -> type:
    class WatchedSpec(kind):  # type: ignore[misc]  # the class of a spec is only known here
        """A module spec that runs the waiting callbacks when its module is complete."""

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
        if waiting:  # one of them raised ActivationError, which `strict` asks for; the others are still called
            _tell(spec)


class _ReloadFinder:
    """A meta-path finder that detects the second execution of a module, and every later one."""

    def __init__(self, heard: Callable[[str, ModuleType], None]) -> None:
        self.names: set[str] = set()
        self.executed: set[str] = set()
        """Modules that were executed, or are about to be; wrapt's hook handles the first execution."""
        self.heard = heard
        self._searching = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of the other finders, with a loader that calls back after executing the module."""
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
    """Return a spec for the loaded copy of a module of this package that was removed from `sys.modules`, or None.

    A second copy of the module would have none of the decisions and seams of the first, and other classes.
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
    """A loader that returns a loaded module and executes nothing."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, _: object) -> ModuleType:
        """Return the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is, and restore its spec."""
        module.__spec__ = self._spec


def _call_after_exec(name: str, loader: Any, heard: Callable[[str, ModuleType], None]) -> None:
    # An attribute of this loader instance, not a wrapper around it: its type and its other methods stay upstream's.
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
