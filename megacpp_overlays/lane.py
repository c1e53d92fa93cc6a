"""The state of this process: settings, overlays, their records and what they changed.

Arming is all that an import of this package does, so what is only needed to settle a target or to report is
imported by the functions that do that.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

from megacpp_overlays import registry
from megacpp_overlays.audit import Audit, raise_for
from megacpp_overlays.errors import RegistryError
from megacpp_overlays.hooks import Hooks
from megacpp_overlays.log import Log
from megacpp_overlays.model import Decision, Evidence, Finding, Overlay, Record, Verdict
from megacpp_overlays.settings import Mode, Settings, Switch, plugin_names
from megacpp_overlays.source import InstalledTree, Remembered
from megacpp_overlays.version import VERSION

if TYPE_CHECKING:
    from megacpp_overlays.install import Installed
    from megacpp_overlays.seams import Seam


class Lane:
    """Arms overlays, settles each when its target is complete, and answers for all of them."""

    def __init__(self, overlays: Sequence[Overlay], settings: Settings) -> None:
        self.overlays = tuple(overlays)
        self.settings = settings
        self._log = Log(settings)
        self._hooks = Hooks(self)
        self._tree = InstalledTree()
        self._records: dict[str, Record] = {}
        self._installed: dict[str, list[Installed]] = {}
        self._undone: set[str] = set()
        self._locks: dict[str, threading.RLock] = {}
        self.renew_locks()

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Lane:
        """Return the lane that the environment describes.

        Raises:
            SettingsError: a name or value in the environment is not known.
            RegistryError: the declarations do not fit together.
        """
        overlays = registry.load(plugin_names(env))
        return cls(overlays, Settings.from_env(env, {overlay.id for overlay in overlays}))

    def renew_locks(self) -> None:
        """Make fresh locks. A forked child needs them: a thread that it does not have may hold the old ones."""
        # One lock a target, reentrant. A thread that settles one target may import a module that another thread
        # is importing; with one lock for all targets, that thread could be waiting for us.
        self._locks = {name: threading.RLock() for name in self._targets()}

    def _targets(self) -> list[str]:
        return list(dict.fromkeys(overlay.target.module for overlay in self.overlays))

    def arm(self) -> None:
        """Watch every target. Arming again settles what was undone and changes nothing else."""
        waiting = [_before_import(overlay, self.settings) for overlay in self.overlays]
        # setdefault: another thread may be arming too, and may have settled a target already.
        fresh = [record for record in waiting if self._records.setdefault(record.overlay.id, record) is record]
        if fresh:
            self._log.armed(fresh)
        if self.settings.mode is Mode.OFF:
            return
        undone, self._undone = self._undone, set()
        for name in self._targets():
            self._hooks.watch(name)
        for overlay in self.overlays:
            if overlay.id in undone:
                self._records[overlay.id] = _before_import(overlay, self.settings)
        for name in dict.fromkeys(o.target.module for o in self.overlays if o.id in undone):
            if (module := sys.modules.get(name)) is not None:
                self.loaded(module, late=True, only=undone)

    def loaded(self, module: ModuleType, *, late: bool, only: Collection[str] | None = None) -> None:
        """Settle the overlays whose target is this module (called by the hooks).

        Raises:
            ActivationError: `strict` is on and one of them ended in conflict.
        """
        mine = [o for o in self.overlays if o.target.module == module.__name__ and o.id not in self._undone]
        with self._locks[module.__name__]:
            settled = [
                self._settle(overlay, module, late=late, again=only is not None)
                for overlay in mine
                if only is None or overlay.id in only
            ]
        if self.settings.mode is Mode.STRICT:
            raise_for([record for record in settled if record.decision is Decision.CONFLICT])

    def failed(self, module_name: str, error: Exception) -> None:
        """Record that the loader itself failed on a module (called by the hooks)."""
        for overlay in self.overlays:
            if overlay.target.module == module_name:
                self._keep(_conflict(_before_import(overlay, self.settings), error))

    def undo(self, overlay_id: str | None = None) -> None:
        """Put back what one overlay, or every overlay, replaced. It stays off until `arm` is called again.

        Raises:
            SeamError: somebody replaced an attribute after us; the rest is undone.
            RegistryError: there is no such overlay.
        """
        from megacpp_overlays.install import undo_all

        chosen = [overlay for overlay in self.overlays if overlay_id in {None, overlay.id}]
        if overlay_id is not None and not chosen:
            known = ", ".join(overlay.id for overlay in self.overlays)
            raise RegistryError(f"there is no overlay {overlay_id}; known: {known}")
        changed: list[Seam] = []
        for overlay in chosen:
            self._undone.add(overlay.id)
            for installed in self._installed.pop(overlay.id, []):
                changed += installed.changes
            record = self._records.get(overlay.id)
            if record is not None and record.decision in {Decision.ACTIVE, Decision.ARMED}:
                self._records[overlay.id] = replace(
                    record, decision=Decision.DISABLED, reason="undone in this process", seams=(), rebound=()
                )
        undo_all(changed)

    def audit(self) -> Audit:
        """Return all decisions as they stand now.

        A seam that somebody else replaced since, and a target that is not there at all, are noticed here.

        Raises:
            ActivationError: `strict` is on and there is a conflict.
        """
        audit = self.snapshot()
        if self.settings.mode is Mode.STRICT:
            raise_for(audit.conflicts)
        return audit

    def snapshot(self) -> Audit:
        """Return the same as `audit`, and never raise: for reports that show conflicts themselves."""
        records = tuple(self._review(self._records[o.id]) for o in self.overlays if o.id in self._records)
        return Audit(version=VERSION, mode=self.settings.mode.value, records=records)

    def _settle(self, overlay: Overlay, module: ModuleType, *, late: bool, again: bool) -> Record:
        from megacpp_overlays import install

        kept = [installed.still_in_place() for installed in self._installed.pop(overlay.id, [])]
        self._installed[overlay.id] = [installed for installed in kept if installed.changes]
        tree = Remembered(self._tree)
        record = _before_import(overlay, self.settings)
        try:
            record = install.assess(overlay, module, self.settings, tree)
            if record.decision is Decision.ACTIVE:
                installed = install.install(overlay, record.shape, module, tree, late=late, again=again)
                self._installed[overlay.id].append(installed)
                record = replace(
                    record,
                    seams=tuple(str(seam) for seam in installed.seams),
                    rebound=tuple(str(seam) for seam in installed.rebound),
                )
        except Exception as error:  # noqa: BLE001 - undone already; upstream must go on as if we were not here
            record = _conflict(record, error)
        return self._keep(record)

    def _keep(self, record: Record) -> Record:
        self._records[record.overlay.id] = record
        self._log.decided(record)
        return record

    def _review(self, record: Record) -> Record:
        if record.decision is Decision.ARMED:
            return _if_absent(record, self._tree)
        if record.decision is Decision.ACTIVE:
            installed = self._installed.get(record.overlay.id, [])[-1:]  # empty while another thread settles anew
            lost = [str(seam) for each in installed for seam in each.seams if not seam.in_place]
            if lost:
                reason = f"replaced by somebody else after installing: {', '.join(lost)}"
                return replace(record, decision=Decision.CONFLICT, reason=reason)
        return record


def _before_import(overlay: Overlay, settings: Settings) -> Record:
    if settings.mode is Mode.OFF:
        return Record(overlay=overlay, decision=Decision.DISABLED, reason="MEGACPP_OVERLAYS=off")
    if settings.switch(overlay.id) is Switch.OFF:
        return Record(overlay=overlay, decision=Decision.DISABLED, reason=f"{overlay.variable}=off")
    reason = f"waits for the import of {overlay.target.module}"
    return Record(overlay=overlay, decision=Decision.ARMED, reason=reason)


def _conflict(record: Record, error: Exception) -> Record:
    own = type(error).__module__.startswith("megacpp_overlays.")
    reason = str(error) if own else f"{type(error).__name__}: {error}"
    return replace(record, decision=Decision.CONFLICT, reason=reason)


def _if_absent(record: Record, tree: InstalledTree) -> Record:
    from megacpp_overlays import distributions, install

    target = record.overlay.target
    if install.source_of(record.overlay, tree) is not None:
        return record
    version = distributions.version(target.distribution)
    where = f"{target.distribution} {version}" if version else target.distribution
    seen = f"{where} has no {target.module}" if version else f"{where} is not installed"
    return replace(
        record,
        decision=Decision.ABSENT,
        reason=seen,
        version=version,
        finding=Finding(verdict=Verdict.ABSENT, shape=None, evidence=(Evidence(seen=seen),)),
    )


_current: Lane | None = None


def current() -> Lane:
    """Return the one lane of this process; the first call reads the environment."""
    global _current
    if _current is None:
        _current = Lane.from_env()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_current.renew_locks)
    return _current
