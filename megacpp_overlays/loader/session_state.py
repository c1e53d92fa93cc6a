"""State of a session: settings, declarations, the state of each part, and the locks of targets.

The modules that change a process take it as their first argument. The state changes no module of upstream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megacpp_overlays.loader.decide import before_import
from megacpp_overlays.loader.declarations import Declarations
from megacpp_overlays.loader.log import Log
from megacpp_overlays.loader.part_state import PartState
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.loader.target_locks import TargetLock, TargetLocks
from megacpp_overlays.model import Decision, Erratum, Overlay, Record
from megacpp_overlays.source.trees import CachedTree, InstalledTree, ParsedOnce

if TYPE_CHECKING:
    from megacpp_overlays.loader.heap import HeapSnapshot


class SessionState:
    """The overlays and gates of a session, with their settings, records and locks."""

    def __init__(self, declared: Declarations, settings: Settings, log: Log) -> None:
        self.declared = declared
        self.settings = settings
        self.log = log
        self.installed = ParsedOnce(InstalledTree())
        """The installed source; each file is parsed once between two audits."""
        self.parts: dict[Erratum, PartState] = {}
        """By declaration, not by id: an overlay may have several parts, and each is decided on its own."""
        self.locks = TargetLocks(name for each in declared.listed for name in each.targets)
        self.heap: HeapSnapshot | None = None
        """The heap snapshot shared by overlays that are armed together."""
        self.gates_looked: tuple[object, ...] = ()
        """The key of the search for packages when gates were last decided."""
        self.when_changed: Callable[[], None] | None = None
        """Called after every decision, inside the hooks; it must not raise and must not decide any target."""
        self.when_active: Callable[[Record], bool] | None = None
        """Called with the record of each overlay that becomes active, until it returns True; the rules of `when_changed` apply."""

    @property
    def overlays(self) -> tuple[Erratum, ...]:
        """Every part of every overlay and every gate, in order.

        Raises:
            RegistryError: the declarations do not fit together, or differ from the list.
        """
        return self.declared.errata

    def tree(self) -> CachedTree:
        """Return the installed source as a tree that reads each file once."""
        return CachedTree(self.installed)

    def part(self, erratum: Erratum) -> PartState:
        """Return the state of a part; the first call creates it."""
        found = self.parts.get(erratum)
        return found or self.parts.setdefault(erratum, PartState(before_import(erratum, self.settings)))

    def about(self, name: str) -> list[Overlay]:
        """Return the overlays whose target is this module."""
        return [overlay for overlay in self.declared.overlays if overlay.target.module == name]

    def lock_of(self, erratum: Erratum) -> TargetLock:
        """Return the lock of the target of a part."""
        return self.locks.at(erratum.target.module)

    def renew_locks(self) -> None:
        """Create new locks, which a forked child needs."""
        self.locks.renew()

    def forget_heap(self) -> None:
        """Drop the heap snapshot: names of a seam were bound to its original again, and the snapshot lacks them."""
        if self.heap is not None:
            self.heap.forget()

    def keep(self, record: Record) -> Record:
        """Store the record that ends a change, log it, and call the listeners."""
        part = self.part(record.overlay)
        part.record = record
        part.change = None
        self.log.decided(record)
        if record.decision is Decision.ACTIVE and self.when_active is not None and self.when_active(record):
            self.when_active = None
        self.changed()
        return record

    def changed(self) -> None:
        """Call the listener after a decision."""
        if self.when_changed is not None:
            self.when_changed()
