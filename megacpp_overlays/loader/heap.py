"""HeapSnapshot: one walk over the heap, shared by all overlays that are armed together.

`gc.get_referrers` visits every object of the process, for one function or for many. A snapshot calls it once for all
functions that a session may replace, and searches once for the classes that hold them. A query takes it again if a module of
another package was imported since, or if the snapshot lacks an object of the query. A snapshot keeps referrers alive, so it must
not outlive the call that made it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from types import FrameType, ModuleType
from typing import Any

_OURS = f"{__name__.partition('.')[0]}."
_namespace_of = type.__dict__["__dict__"].__get__
"""Return the namespace proxy of a class, without calling its metaclass."""


class HeapSnapshot:
    """The referrers of some functions, and the modules and classes whose namespaces are among them.

    Args:
        wanted: returns the functions to search for; called each time the snapshot is taken.
    """

    def __init__(self, wanted: Callable[[], Iterable[object]]) -> None:
        self._wanted = wanted
        self.forget()

    def forget(self) -> None:
        """Drop the snapshot; the next query takes a new one."""
        self._loaded: frozenset[str] | None = None
        self._latest: tuple[int, str] | None = None
        self._modules: dict[int, ModuleType] = {}
        self._referrers: dict[int, list[Any]] = {}
        self._classes: dict[int, list[type]] = {}

    def referrers(self, *objects: object) -> list[Any]:
        """Return the referrers in the snapshot that still refer to any of the objects, except frames."""
        return self._current(objects)

    def _current(self, objects: tuple[object, ...]) -> list[Any]:
        self._renew(objects)
        wanted = set(map(id, objects))
        found = {id(each): each for each in objects for each in self._referrers[id(each)]}
        return [each for each in found.values() if not wanted.isdisjoint(map(id, gc.get_referents(each)))]

    def owners(self, *objects: object) -> list[ModuleType | type]:
        """Return the modules and classes whose namespaces hold any of the objects."""
        owners: dict[int, ModuleType | type] = {}
        for each in self._current(objects):  # `referrers(*objects)` would make another tuple, one more referrer
            if (module := self._modules.get(id(each))) is not None:
                owners[id(module)] = module
            owners |= {id(cls): cls for cls in self._classes.get(id(each), ())}
        return list(owners.values())

    def _renew(self, objects: tuple[object, ...]) -> None:
        if all(id(each) in self._referrers for each in objects) and self._is_as_loaded():
            return
        self.forget()
        wanted = {id(each): each for each in (*self._wanted(), *objects)}
        self._referrers = _referrers(wanted, but=objects)
        self._modules = {id(vars_of(each)): each for each in loaded_modules()}
        namespaces = {
            id(each): each
            for referrers in self._referrers.values()
            for each in referrers
            if type(each) is dict and id(each) not in self._modules
        }
        self._classes = _classes(namespaces)
        self._loaded = frozenset(sys.modules)
        self._latest = _latest_module()

    def _is_as_loaded(self) -> bool:
        """Return whether there is a snapshot, and no module but those of this package was imported since."""
        if self._loaded is None:
            return False
        latest = _latest_module()
        if latest == self._latest:
            return True
        if others_were_loaded(self._loaded):
            return False
        self._latest = latest
        return True


def others_were_loaded(before: AbstractSet[str]) -> bool:
    """Return whether a module was loaded since `sys.modules` had the given names.

    Modules of this package do not count, because they bind no function of a target.
    """
    return any(not name.startswith(_OURS) for name in sys.modules.keys() - before)


def _latest_module() -> tuple[int, str]:
    """Return the number of loaded modules and the name of the last one; `sys.modules` keeps the order of imports."""
    return len(sys.modules), next(reversed(sys.modules))


def _classes(namespaces: Mapping[int, Any]) -> dict[int, list[type]]:
    """Return the classes that have the namespaces, by the id of each namespace.

    The search walks over the subclasses of `object`, which takes a third of the time of a search of the heap.
    """
    found: dict[int, list[type]] = {number: [] for number in namespaces}
    waiting: list[type] = [object] if namespaces else []
    seen = {id(each) for each in waiting}
    while waiting:
        cls = waiting.pop()
        for number in map(id, gc.get_referents(_namespace_of(cls))):
            if number in found:
                found[number].append(cls)
        heirs: list[type] = type.__subclasses__(cls)
        waiting += (each for each in heirs if id(each) not in seen)
        seen |= set(map(id, heirs))
    return found


def _referrers(wanted: dict[int, Any], *, but: tuple[object, ...]) -> dict[int, list[Any]]:
    """Return the referrers of each object, by its id, except frames and the two containers `wanted` and `but`."""
    found: dict[int, list[Any]] = {number: [] for number in wanted}
    if not wanted:
        return found
    for referrer in gc.get_referrers(*wanted.values()):
        if referrer is not wanted and referrer is not but and not isinstance(referrer, FrameType):
            for number in {id(each) for each in gc.get_referents(referrer)} & wanted.keys():
                found[number].append(referrer)
    return found


def loaded_modules() -> list[ModuleType]:
    """Return every module in `sys.modules` once; entries that are no modules are left out."""
    # type() and not isinstance: a lazy module may import something when its __class__ is read.
    found = {id(each): each for each in list(sys.modules.values()) if issubclass(type(each), ModuleType)}
    return list(found.values())


def vars_of(module: ModuleType) -> dict[str, Any]:
    """Return the namespace of a module; unlike `vars`, this does not wake a lazy module."""
    namespace: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return namespace
