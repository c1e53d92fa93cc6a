"""The state of this process: settings, overlays, their records and what they changed.

Gates are decided when the session is armed, overlays when their target has been imported.

Arming is all that an import of this package does, so what is only needed to settle a target or to report is
imported by the functions that do that.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from megacpp_overlays import variables
from megacpp_overlays.errors import ActivationError, RegistryError, SeamError
from megacpp_overlays.frozen import replace
from megacpp_overlays.loader import registry
from megacpp_overlays.loader.audit import Audit, raise_for
from megacpp_overlays.loader.decide import before_import
from megacpp_overlays.loader.import_hooks import Hooks, is_half_imported
from megacpp_overlays.loader.log import Log
from megacpp_overlays.loader.settings import Mode, Settings, plugin_names
from megacpp_overlays.model import Decision, Erratum, Evidence, Finding, Gate, Overlay, Record, Verdict
from megacpp_overlays.source.trees import InstalledTree, Remembered, SourceTree, readable
from megacpp_overlays.version import VERSION

if TYPE_CHECKING:
    from megacpp_overlays.loader.install import PlacedSeams

_UNDONE = "undone in this process"
_FROM_DISK = (
    "torch._dynamo.config.caching_precompile brings back compiled graphs of processes that may have run without this "
    "overlay; unset TORCH_CACHING_PRECOMPILE"
)


class Session:
    """Arms overlays, settles each when its target is complete, and answers for all of them."""

    def __init__(self, overlays: Sequence[Erratum], settings: Settings) -> None:
        self.overlays = tuple(overlays)
        """Every overlay and every gate, in order."""
        self._watched = tuple(each for each in overlays if isinstance(each, Overlay))
        self._gates = tuple(each for each in overlays if isinstance(each, Gate))
        self.settings = settings
        self._log = Log(settings)
        self._hooks = Hooks(self)
        self._tree = InstalledTree()
        # By declaration, not by id: an overlay may have several parts, and each is decided on its own.
        self._records: dict[Erratum, Record] = {}
        self._installed: dict[Erratum, list[PlacedSeams]] = {}
        self._undone: set[Erratum] = set()
        self._locks: dict[str, threading.RLock] = {}
        self.when_changed: Callable[[], None] | None = None
        """Called after every decision, inside the hooks; it must not raise and must not settle anything."""
        self.renew_locks()

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Session:
        """Return the session that the environment describes.

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
        self._locks = {overlay.target.module: threading.RLock() for overlay in self.overlays}

    def _targets(self) -> list[str]:
        """Return the modules whose import settles something."""
        return list(dict.fromkeys(overlay.target.module for overlay in self._watched))

    def _about(self, name: str) -> list[Overlay]:
        """Return the overlays that are settled when this module has been imported."""
        return [overlay for overlay in self._watched if overlay.target.module == name]

    def arm(self) -> None:
        """Decide the gates and watch every target. Arming again settles what was undone and changes nothing else."""
        tree = Remembered(self._tree)
        waiting = [self._first_record(overlay, tree) for overlay in self.overlays if overlay not in self._records]
        # setdefault: another thread may be arming too, and may have settled a target already.
        fresh = [record for record in waiting if self._records.setdefault(record.overlay, record) is record]
        if fresh:
            self._log.armed(fresh)
            self._log.gates([record for record in fresh if not record.overlay.installs])
        self._log.obsolete_variables()
        if self.settings.mode is Mode.OFF:
            return
        undone, self._undone = self._undone, set()
        for overlay in self.overlays:
            if overlay in undone:
                self._records[overlay] = self._first_record(overlay, tree)
        conflicts: list[str] = []
        for name in self._targets():
            with _collecting(conflicts):
                self._hooks.watch(name)
            again = [overlay for overlay in self._about(name) if overlay in undone]
            if again and (module := sys.modules.get(name)) is not None:
                with _collecting(conflicts):
                    self._settle_all(name, again, module, late=True, again=True)
        self._changed()
        if conflicts:  # strict: every target has been settled before the first of them is raised
            raise ActivationError("\n".join(conflicts))

    def _first_record(self, erratum: Erratum, tree: SourceTree) -> Record:
        """Return what is known of an overlay before its target is imported, and all there is to know of a gate."""
        record = before_import(erratum, self.settings)
        if isinstance(erratum, Gate) and record.decision is Decision.ARMED:  # one that is switched off is not asked
            from megacpp_overlays.loader import probing

            return probing.assess_gate(erratum, self.settings, tree)
        return record

    def _settle_gates_that_saw_nothing(self) -> None:
        """Ask the gates again whose packages were not there: a launcher may have completed its path since."""
        tree = Remembered(self._tree)
        for gate in self._gates:
            record = self._records.get(gate)
            if record is not None and record.decision is Decision.ABSENT:
                found = self._first_record(gate, tree)
                if found.decision is not Decision.ABSENT:
                    self._records[gate] = found
                    self._log.gates([found])

    def loaded(self, name: str, module: ModuleType, *, late: bool) -> None:
        """Settle the overlays whose target is this module (called by the hooks).

        Args:
            name: the name under which it was watched.
            module: the module, complete.
            late: see `install.Circumstances`.

        Raises:
            ActivationError: `strict` is on and one of them ended in conflict.
        """
        self._settle_all(name, self._about(name), module, late=late, again=False)

    def _settle_all(
        self, name: str, overlays: Sequence[Overlay], module: ModuleType, *, late: bool, again: bool
    ) -> None:
        """Settle overlays of one target, but for those that are undone."""
        self._settle_gates_that_saw_nothing()
        with self._locks[name]:
            chosen = [overlay for overlay in overlays if overlay not in self._undone]
            settled = [self._settle(overlay, module, late=late, again=again) for overlay in chosen]
        if self.settings.mode is Mode.STRICT:
            raise_for([record for record in settled if record.decision is Decision.CONFLICT])

    def failed(self, name: str, error: Exception) -> None:
        """Record that the loader itself failed on a module (called by the hooks)."""
        for overlay in self._about(name):
            self._keep(_conflict(before_import(overlay, self.settings), error))

    def undo(self, overlay_id: str | None = None) -> None:
        """Put back what one overlay, or every overlay, replaced. It stays off until `arm` is called again.

        A launcher may still name an overlay that was retired: it is told so, and goes on.

        Raises:
            SeamError: somebody replaced an attribute after us; the rest is undone, and the overlay is in conflict. Or
                a graph of torch.compile cannot be dropped now, see `compiled`; then everything stays in.
            RegistryError: there is no such overlay.
        """
        chosen = [overlay for overlay in self.overlays if overlay_id in {None, overlay.id}]
        if overlay_id is not None and not chosen:
            from megacpp_overlays.loader import retired

            if (gone := retired.find(overlay_id)) is not None:
                self._log.retired(f"{gone}: there is nothing to undo")
                return
            known = ", ".join(dict.fromkeys(overlay.id for overlay in self.overlays))
            raise RegistryError(f"there is no overlay {overlay_id}; known: {known}")
        if any(self._installed.get(overlay) for overlay in chosen):
            from megacpp_overlays.runtime import dynamo

            dynamo.check()
        problems = [problem for overlay in chosen if (problem := self._undo_one(overlay))]
        self._changed()
        if problems:
            raise SeamError("; ".join(problems))

    def _undo_one(self, overlay: Erratum) -> str:
        """Undo one overlay; return what could not be put back, in words."""
        from megacpp_overlays.loader import aliases
        from megacpp_overlays.runtime import dynamo

        with self._locks[overlay.target.module]:
            changed = [seam for each in self._installed.get(overlay, []) for seam in each.changes]
            dropped = functools.partial(self._log.dropped, overlay)
            with dynamo.changing(dropped=dropped) if changed else contextlib.nullcontext():
                self._undone.add(overlay)
                self._installed.pop(overlay, None)
                lost = [seam for seam in reversed(changed) if not seam.undo()]
                aliases.restore_aliases([seam for seam in changed if seam not in lost])
            record = self._records.get(overlay)
            if record is None or record.decision not in {Decision.ACTIVE, Decision.ARMED, Decision.CONFLICT}:
                return ""
            off = replace(record, seams=(), rebound=())
            if not lost:
                if record.decision is not Decision.CONFLICT:
                    self._records[overlay] = replace(off, decision=Decision.DISABLED, reason=_UNDONE)
                return ""
            from megacpp_overlays.loader.install import PlacedSeams

            self._installed[overlay] = [PlacedSeams(tuple(reversed(lost)), ())]  # for another try
            reason = "; ".join(seam.taken_by() for seam in lost)
            kept = tuple(str(seam) for seam in lost)
            self._records[overlay] = replace(off, decision=Decision.CONFLICT, reason=reason, seams=kept)
            return reason

    def audit(self) -> Audit:
        """Return all decisions as they stand now, and settle what no hook heard of; it does not raise for a conflict.

        A seam that somebody else replaced since, and a target that is not there at all, are noticed here.
        """
        self._settle_missed_imports()
        self._settle_gates_that_saw_nothing()
        records = tuple(_with_version(self._review(self._records[o])) for o in self.overlays if o in self._records)
        return Audit(version=VERSION, mode=self.settings.mode.value, records=records)

    def audit_so_far(self) -> Audit:
        """Return the decisions as they were taken; looks for nothing and settles nothing, so a hook may ask."""
        taken = [self._records[o] for o in self.overlays if o in self._records]
        records = tuple(r if r.decision is Decision.ARMED else self._review(r) for r in taken)
        return Audit(version=VERSION, mode=self.settings.mode.value, records=records)

    def _settle_missed_imports(self) -> None:
        """Settle a target that was loaded past every hook, by a loader or a recipe of somebody's own."""
        for name in self._targets():
            module = sys.modules.get(name)
            waits = any((r := self._records.get(o)) and r.decision is Decision.ARMED for o in self._about(name))
            if waits and module is not None and not is_half_imported(module) and self.settings.mode is not Mode.OFF:
                with _collecting([]):  # the audit that asks for this raises for every conflict itself
                    self._hooks.complete(name, module, late=True)

    def _settle(self, overlay: Overlay, module: ModuleType, *, late: bool, again: bool) -> Record:
        from megacpp_overlays.loader import install, probing

        tree = Remembered(self._tree)
        record = before_import(overlay, self.settings)
        kept = [each.still_in_place() for each in self._installed.get(overlay, [])]
        try:
            record = probing.assess_overlay(overlay, module, self.settings, tree)
            if record.decision is Decision.ACTIVE:
                dropped = functools.partial(self._log.dropped, overlay)
                circumstances = install.Circumstances(late=late, again=again, dropped=dropped)
                installed = install.install(overlay, record.shape, module, tree, circumstances)
                kept.append(installed)
                record = replace(
                    record,
                    seams=tuple(str(seam) for seam in installed.seams),
                    rebound=tuple(str(seam) for seam in installed.rebound),
                )
        except Exception as error:  # noqa: BLE001 - undone already; upstream must go on as if we were not here
            record = _conflict(record, error)
        self._installed[overlay] = [each for each in kept if each.changes]
        return self._keep(record)

    def _keep(self, record: Record) -> Record:
        self._records[record.overlay] = record
        self._log.decided(record)
        self._changed()
        return record

    def _changed(self) -> None:
        if self.when_changed is not None:
            self.when_changed()

    def _review(self, record: Record) -> Record:
        if record.decision is Decision.ARMED:
            return _if_absent(record, self._tree)
        if record.decision is Decision.ACTIVE:
            from megacpp_overlays.loader.seams import describe
            from megacpp_overlays.runtime import dynamo

            if dynamo.come_from_disk():
                return replace(record, decision=Decision.CONFLICT, reason=_FROM_DISK)
            installed = self._installed.get(record.overlay, [])[-1:]  # empty while another thread settles anew
            over = [seam for each in installed for seam in each.seams if not seam.in_place]
            lost = [seam for seam in over if not seam.is_wrapped]
            if lost:
                reason = "; ".join(f"{seam} was replaced after us by {describe(seam.current)}" for seam in lost)
                return replace(record, decision=Decision.CONFLICT, reason=reason)
            if over:
                wrapped = "; ".join(f"{seam} is wrapped by {describe(seam.current)}" for seam in over)
                return replace(record, reason=f"{record.reason}; {wrapped}")
        return record


def _with_version(record: Record) -> Record:
    """Return the record of a gate with its versions: where it had nothing to say it did not spend the time to look."""
    if record.version or record.overlay.installs or record.finding is None:
        return record
    from megacpp_overlays.loader import probing

    return replace(record, version=probing.versions(record.overlay))


def _conflict(record: Record, error: Exception) -> Record:
    own = type(error).__module__.startswith("megacpp_overlays.")
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - somebody's exception cannot even say what it is
        text = "no text"
    reason = text if own else f"{type(error).__name__}: {text}"
    return replace(record, decision=Decision.CONFLICT, reason=reason)


@contextlib.contextmanager
def _collecting(conflicts: list[str]) -> Iterator[None]:
    try:
        yield
    except ActivationError as error:
        conflicts.append(str(error))


def _if_absent(record: Record, tree: InstalledTree) -> Record:
    from megacpp_overlays.source import distributions

    target = record.overlay.target
    if readable(tree, target.module) is not None:
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


_current: Session | None = None


def current() -> Session:
    """Return the one session of this process; the first call reads the environment."""
    global _current
    if _current is None:
        _current = Session.from_env()
        variables.hand_down(_current.settings.of_kernels)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_current.renew_locks)
    return _current
