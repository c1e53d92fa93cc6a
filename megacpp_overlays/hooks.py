"""Know when a target module has been executed, whatever the order of events. The one user of wrapt.

Four ways lead to a complete module, and each ends in one call of the listener:

    imported later          wrapt's post-import hook
    imported already        at once
    half-imported           when its `__spec__._initializing` turns False; its namespace is unfinished until then
    executed once more      a finder of our own, because wrapt pops its hooks after one firing, so that a reload
                            or a fresh import would lose the seams in silence

This is also the one error boundary. No exception leaves a hook, least of all an ImportError; only
ActivationError does, which `strict` asks for.
"""

from __future__ import annotations

import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol, cast

import wrapt

from megacpp_overlays.errors import ActivationError


class Listener(Protocol):
    """Who is told."""

    def loaded(self, module: ModuleType, *, late: bool) -> None:
        """A watched module is complete. `late`: other code may have run since it was executed."""

    def failed(self, module_name: str, error: Exception) -> None:
        """The listener itself raised while it dealt with a module."""


class Hooks:
    """Watches modules by name and tells one listener."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._registering = threading.local()
        self._finder = _LaterLoads(self._complete)

    def watch(self, name: str) -> None:
        """Tell the listener about every complete execution of a module. Watching twice is watching once."""
        if name in self._finder.names:
            return
        self._finder.names.add(name)
        if self._finder not in sys.meta_path:
            sys.meta_path.insert(0, self._finder)
        self._register(name)

    def close(self) -> None:
        """Watch nothing any more. Hooks that wrapt still holds do nothing when they fire."""
        self._finder.names.clear()
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)

    def _register(self, name: str) -> None:
        # wrapt calls back at once for whatever sits in sys.modules, even if it is still being executed.
        self._registering.active = True
        try:
            wrapt.register_post_import_hook(self._from_wrapt, name)
        finally:
            self._registering.active = False

    def _from_wrapt(self, module: ModuleType) -> None:
        if module.__name__ not in self._finder.names:
            return
        if not getattr(self._registering, "active", False):
            self._complete(module, late=False)
        elif not _is_half_imported(module):
            self._complete(module, late=True)
        else:
            _when_complete(module, self._resolved)

    def _resolved(self, module: ModuleType) -> None:
        """A half-imported module is complete now, or its import failed and it starts afresh."""
        if sys.modules.get(module.__name__) is module:
            self._complete(module, late=True)
        else:
            self._register(module.__name__)

    def _complete(self, module: ModuleType, *, late: bool) -> None:
        self._finder.executed.add(module.__name__)
        try:
            self._listener.loaded(module, late=late)
        except ActivationError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary: importing upstream must not fail for us
            self._listener.failed(module.__name__, error)


def _is_half_imported(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _when_complete(module: ModuleType, then: Callable[[ModuleType], None]) -> None:
    """Call `then` at the moment the import system declares a half-imported module complete.

    The import system announces it by setting `spec._initializing` to False, after the last line of the module
    and before any other thread may go on with it. Giving the spec a class of ours turns that into a call.
    """
    spec = module.__spec__
    told = threading.Lock()

    def tell_once() -> None:
        if told.acquire(blocking=False):
            then(module)

    class WatchedSpec(type(spec)):  # type: ignore[misc]  # the class of a spec is only known here
        """A spec that tells when its module is complete."""

        @property
        def _initializing(self) -> bool:
            return bool(self.__dict__.get("_initializing", False))

        @_initializing.setter
        def _initializing(self, value: bool) -> None:
            self.__dict__["_initializing"] = value
            if not value:
                self.__class__ = type(self).__mro__[1]
                tell_once()

    spec.__class__ = WatchedSpec
    if not _is_half_imported(module):  # another thread finished it just before the line above
        tell_once()


class _LaterLoads:
    """A meta-path finder that notices when a module that was executed once is executed again."""

    def __init__(self, complete: Callable[..., None]) -> None:
        self.names: set[str] = set()
        self.executed: set[str] = set()
        self._complete = complete
        self._searching = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the other finders give, with a loader that calls back after executing."""
        if name not in self.names or name not in self.executed or getattr(self._searching, "active", False):
            return None
        self._searching.active = True
        try:
            spec = _ask_others(self, name, path, target)
        finally:
            self._searching.active = False
        if spec is not None and spec.loader is not None:
            _call_after_exec(spec.loader, self._complete)
        return spec


def _ask_others(
    own: object, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)  # the import system, too, passes by a finder without it
        if finder is not own and find_spec is not None and (spec := find_spec(name, path, target)) is not None:
            return cast("importlib.machinery.ModuleSpec", spec)
    return None


def _call_after_exec(loader: Any, complete: Callable[..., None]) -> None:
    # An attribute of this one loader, not a wrapper around it: its type and its other methods stay upstream's.
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        original(module)
        complete(module, late=True)

    loader.exec_module = exec_module
