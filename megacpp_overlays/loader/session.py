"""Session of this process: the operations `arm`, `undo` and `audit`, and the handling of imported targets.

Gates are decided when torch has been imported, overlays when their target has been. The first target and an audit decide both.

An import of this package only arms. The modules that decide a target or make a report are therefore imported by the methods
that need them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from types import ModuleType

from megacpp_overlays import variables
from megacpp_overlays.errors import ActivationError, RegistryError, SeamError
from megacpp_overlays.loader import declarations, derived_records, first_records
from megacpp_overlays.loader.audit import Audit
from megacpp_overlays.loader.decide import before_import, is_off
from megacpp_overlays.loader.declarations import Declarations
from megacpp_overlays.loader.import_hooks import Hooks, is_half_imported
from megacpp_overlays.loader.log import Log
from megacpp_overlays.loader.session_state import SessionState
from megacpp_overlays.loader.settings import Mode, Settings, plugin_names
from megacpp_overlays.model import Decision, Erratum, Record
from megacpp_overlays.source.trees import SourceTree
from megacpp_overlays.version import VERSION


class Session(SessionState):
    """Manager of all overlays of a process: it arms them, decides each when its target is complete, and audits them."""

    def __init__(
        self,
        declared: Declarations | Sequence[Erratum],
        settings: Settings,
        environment: MutableMapping[str, str] | None = None,
    ) -> None:
        declared = declared if isinstance(declared, Declarations) else Declarations(declared)
        super().__init__(declared, settings, Log(settings, environment))
        self._hooks = Hooks(self)
        self._has_listed_waiting = False

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Session:
        """Return the session that the environment describes.

        Raises:
            SettingsError: a name or value in the environment is not known.
            RegistryError: the declarations do not fit together.
        """
        declared = declarations.of(plugin_names(env))
        return cls(declared, Settings.from_env(env, declared.ids), os.environ if env is os.environ else None)

    def arm(self) -> None:
        """Watch the imports of torch, for the gates, and of every target. A second call decides undone overlays again.

        An overlay counts as undone, too, if an interrupt or a lack of memory ended its change, or if its target was executed
        without a hook. All other overlays are unchanged.

        Raises:
            ActivationError: `strict` is on and an overlay is undecided; it is raised after every target has been decided.
        """
        tree = self.tree()
        self._list_waiting()
        if self.declared.are_loaded or not sys.modules.keys().isdisjoint(self.declared.targets):
            first_records.note_all(self, tree)
        else:
            self._hooks.once_imported("torch", lambda: first_records.note_gates_that_are_there(self))
        self.log.obsolete_variables()
        if self.settings.mode is Mode.OFF:
            return
        conflicts: list[str] = []
        with self._arming_again(tree):
            for name in self.declared.targets:
                with _collecting(conflicts):
                    self._hooks.watch(name)
                with _collecting(conflicts):
                    self._settle_again(name)
        self.changed()
        if conflicts:
            raise ActivationError("\n".join(conflicts))

    def _list_waiting(self) -> None:
        if self._has_listed_waiting:
            return
        self._has_listed_waiting = True
        off = [each for each in self.declared.listed if is_off(each, self.settings)]
        waiting = [each.id for each in self.declared.listed if each.installs and each not in off]
        self.log.armed(waiting, [each.id for each in off if not each.off_by_default])

    def _arming_again(self, tree: SourceTree) -> contextlib.AbstractContextManager[None]:
        """Return a context in which undone overlays are decided again, with one walk over the heap for all."""
        if not self.declared.are_loaded:  # no target is loaded, so nothing was undone, and nothing is decided late
            return contextlib.nullcontext()
        from megacpp_overlays.loader import rearming

        rearming.begin_again(self, tree)
        return rearming.one_heap_walk(self)

    def _settle_again(self, name: str) -> None:
        """Decide overlays of a target again as `arm` requires, if the declarations are loaded."""
        if self.declared.are_loaded:
            from megacpp_overlays.loader import rearming

            rearming.settle_again(self, name)

    def loaded(self, name: str, module: ModuleType, *, late: bool) -> None:
        """Decide and install the overlays whose target is this module (called by the hooks).

        Args:
            name: the name under which it was watched.
            module: the module, fully executed.
            late: see `install.Circumstances`.

        Raises:
            ActivationError: `strict` is on and one of them ended in conflict.
        """
        try:
            if not first_records.note_all(self):
                first_records.ask_gates_if_moved(self)
        except Exception as error:  # without declarations there is no record for the error, so it is logged
            self.log.not_loaded(name, error)
            if self.settings.mode is Mode.STRICT:
                raise ActivationError(f"the overlays of {name} cannot be loaded: {error!r}") from error
            return
        from megacpp_overlays.loader import changes

        changes.apply_all(self, name, self.about(name), module, late=late)

    def failed(self, name: str, error: Exception) -> None:
        """Record an error of the loader itself on a module (called by the hooks)."""
        from megacpp_overlays.loader import changes

        for overlay in self.about(name):
            part = self.part(overlay)
            if part.change is not None or part.record.decision is Decision.ARMED:
                part.is_short_of_memory |= isinstance(error, MemoryError)
                self.keep(derived_records.conflict(before_import(overlay, self.settings), error))
        changes.withdraw_dependents(self, self.about(name))

    def undo(self, overlay_id: str | None = None) -> None:
        """Restore the attributes that one overlay, or every overlay, replaced. It stays off until `arm` is called again.

        A launcher may still name an overlay that was retired: that is logged, and is no error.

        Raises:
            SeamError: other code replaced an attribute after the overlay; the rest is undone, and the overlay is in conflict.
                Or a graph of torch.compile cannot be dropped now, see `compiled`; then everything stays installed.
            RegistryError: there is no such overlay.
        """
        first_records.note_all(self)
        chosen = [overlay for overlay in self.overlays if overlay_id in {None, overlay.id}]
        if overlay_id is not None and not chosen:
            self._say_that_it_retired(overlay_id)
            return
        from megacpp_overlays.loader import changes

        problems = changes.undo_all(self, chosen)
        self.changed()
        if problems:
            raise SeamError("; ".join(problems))

    def _say_that_it_retired(self, overlay_id: str) -> None:
        from megacpp_overlays.loader import retired

        if (gone := retired.find(overlay_id)) is not None:
            self.log.retired(f"{gone}: there is nothing to undo")
            return
        from megacpp_overlays.near_names import suggestion

        near = suggestion(overlay_id, sorted({each.id for each in self.overlays}), where="`megacpp-overlays audit`")
        raise RegistryError(f"there is no overlay {overlay_id}; {near}")

    def audit(self, *, deep: bool = False) -> Audit:
        """Return all current decisions, after deciding targets that were loaded without a hook; a conflict does not raise.

        Each seam is resolved in the running process, so the audit detects replaced seams, and targets that are missing.

        Args:
            deep: whether to walk over the heap too, for objects that hold an original outside of any module name.
        """
        if not first_records.note_all(self):
            first_records.ask_gates_again(self)
        self._settle_missed_imports()
        self._withdraw_over_foreign_code()
        found = self.current_audit(deep=deep)
        self.installed.forget()
        return found

    def _settle_missed_imports(self) -> None:
        """Decide targets that were loaded without a hook, by a library's own loader or recipe."""
        for name in self.declared.targets:
            module = sys.modules.get(name)
            waits = any(self.part(each).record.decision is Decision.ARMED for each in self.about(name))
            if waits and module is not None and not is_half_imported(module) and self.settings.mode is not Mode.OFF:
                with _collecting([]):  # the calling audit raises for every conflict itself
                    self._hooks.complete(name, module, late=True)

    def _withdraw_over_foreign_code(self) -> None:
        if any(part.is_active for part in self.parts.values()):
            from megacpp_overlays.loader import changes

            changes.withdraw_over_foreign_code(self)

    def current_audit(self, *, deep: bool = False) -> Audit:
        """Return the current decisions without deciding any target, as when the process ends."""
        from megacpp_overlays.loader import standing

        return self._audit_of(lambda record: derived_records.with_versions(standing.reviewed(self, record, deep=deep)))

    def audit_so_far(self) -> Audit:
        """Return the decisions so far, without deciding any target; safe to call inside a hook."""
        from megacpp_overlays.loader import standing

        first_records.note_all(self)
        return self._audit_of(
            lambda record: record if record.decision is Decision.ARMED else standing.reviewed(self, record)
        )

    def _audit_of(self, reviewed: Callable[[Record], Record]) -> Audit:
        records = tuple(reviewed(self.parts[each].record) for each in self.overlays if each in self.parts)
        copies = self._hub_copies()
        return Audit(
            version=VERSION, mode=self.settings.mode.value, settings=self.settings, records=records, hub_copies=copies
        )

    def _hub_copies(self) -> tuple[str, ...]:
        """Return sentences on copies of upstream code that the package `kernels` loaded, and warn of each once."""
        if "kernels" not in sys.modules or self.settings.mode is Mode.OFF:
            return ()
        from megacpp_overlays.loader import hub_copies

        found = hub_copies.find(self.overlays)
        self.log.hub_copies(found)
        return found

    def count_at_exit(self) -> None:
        """Log the counts of decisions at the end of the process, if an overlay was decided; counts are not logged twice."""
        records = [each.record for each in self.parts.values()]
        was_settled = any(each.finding is not None and each.overlay.installs for each in records)
        # the interpreter may be shutting down: an error here must not change the exit code
        with contextlib.suppress(Exception):
            if was_settled and self.log.has_to_count(at_exit=True):
                # this audit searches for copies of the Hub, too
                self.log.count(self.current_audit(), at_exit=True)
            else:
                self._hub_copies()


@contextlib.contextmanager
def _collecting(conflicts: list[str]) -> Iterator[None]:
    try:
        yield
    except ActivationError as error:
        conflicts.append(str(error))


_current: Session | None = None


def current() -> Session:
    """Return the single session of this process; the first call reads the environment."""
    global _current
    if _current is None:
        _current = Session.from_env()
        variables.hand_down(_current.settings.of_kernels)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_current.renew_locks)
    return _current
