"""The state of this process: settings, overlays, their records and what they changed.

Gates are decided when torch has been imported, overlays when their target has been; a first target and an audit decide both.

Arming is all that an import of this package does, so what is only needed to settle a target or to report is
imported by the functions that do that.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from megacpp_overlays import variables
from megacpp_overlays.errors import ActivationError, RegistryError, SeamError
from megacpp_overlays.frozen import replace
from megacpp_overlays.loader import declarations, derived_records, registry
from megacpp_overlays.loader.audit import Audit, raise_for
from megacpp_overlays.loader.decide import before_import, is_off
from megacpp_overlays.loader.declarations import Declarations
from megacpp_overlays.loader.import_hooks import Hooks, is_half_imported
from megacpp_overlays.loader.log import Log
from megacpp_overlays.loader.part_state import PartChange, PartState
from megacpp_overlays.loader.settings import Mode, Settings, plugin_names
from megacpp_overlays.loader.turns import Turns
from megacpp_overlays.model import UNDECIDED, Decision, Erratum, Gate, Overlay, Record
from megacpp_overlays.source.trees import CachedTree, InstalledTree, ParsedOnce, SourceTree
from megacpp_overlays.version import VERSION

if TYPE_CHECKING:
    from megacpp_overlays.loader.aliases import MarkedName
    from megacpp_overlays.loader.heap import HeapSnapshot
    from megacpp_overlays.loader.seams import Seam

_OURS = {"megacpp_overlays", "wrapt"}
"""Packages of finders that find nothing on their own."""
_UNDONE = "undone in this process"
_INTERRUPTED = (
    "it was interrupted while it was put in or taken out, and may be in by halves; call megacpp_overlays.arm() or "
    "megacpp_overlays.undo() again"
)


class Session:
    """Arms overlays, settles each when its target is complete, and answers for all of them."""

    def __init__(
        self,
        declared: Declarations | Sequence[Erratum],
        settings: Settings,
        environment: MutableMapping[str, str] | None = None,
    ) -> None:
        self._declared = declared if isinstance(declared, Declarations) else Declarations(declared)
        self.settings = settings
        self.log = Log(settings, environment)
        self._hooks = Hooks(self)
        self._tree = ParsedOnce(InstalledTree())
        # By declaration, not by id: an overlay may have several parts, and each is decided on its own.
        self._parts: dict[Erratum, PartState] = {}
        self._has_said_what_waits = False
        self._heap: HeapSnapshot | None = None
        self._gates_looked: tuple[object, ...] = ()
        self.when_changed: Callable[[], None] | None = None
        """Called after every decision, inside the hooks; it must not raise and must not settle anything."""
        self.when_active: Callable[[Record], bool] | None = None
        """Called with the record of each overlay that becomes active, until it returns True; as `when_changed`."""
        names = [name for each in self._declared.listed for name in each.targets]
        self._turns = Turns(names, (Session._settle_all, Session._settle_again, Session._undo_one))

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Session:
        """Return the session that the environment describes.

        Raises:
            SettingsError: a name or value in the environment is not known.
            RegistryError: the declarations do not fit together.
        """
        declared = declarations.of(plugin_names(env))
        return cls(declared, Settings.from_env(env, declared.ids), os.environ if env is os.environ else None)

    @property
    def overlays(self) -> tuple[Erratum, ...]:
        """Every part of every overlay and every gate, in order.

        Raises:
            RegistryError: the declarations do not fit together, or to the list of them.
        """
        return self._declared.errata

    def renew_locks(self) -> None:
        """Make fresh locks, as a forked child needs them."""
        self._turns.renew()

    def _part(self, erratum: Erratum) -> PartState:
        """Return the state of a part; the first call makes it."""
        found = self._parts.get(erratum)
        return found or self._parts.setdefault(erratum, PartState(before_import(erratum, self.settings)))

    def _about(self, name: str) -> list[Overlay]:
        """Return the overlays that are settled when this module has been imported."""
        return [overlay for overlay in self._declared.overlays if overlay.target.module == name]

    def arm(self) -> None:
        """Watch torch for the gates, and every target. Arming again settles what was undone and changes nothing else.

        What an interrupt or a lack of memory ended, and a target that was executed past every hook, count as undone.
        """
        tree = CachedTree(self._tree)
        self._say_what_waits()
        if self._declared.are_loaded or not sys.modules.keys().isdisjoint(self._declared.targets):
            self._complete(tree)
        else:
            self._hooks.once_imported("torch", self._decide_gates)
        self.log.obsolete_variables()
        if self.settings.mode is Mode.OFF:
            return
        for erratum, part in list(self._parts.items()):
            if part.is_undone:
                self._begin_again(erratum, tree)
        conflicts: list[str] = []
        with self._one_heap_walk():
            for name in self._declared.targets:
                with _collecting(conflicts):
                    self._hooks.watch(name)
                if self._declared.are_loaded:
                    with _collecting(conflicts):
                        self._settle_again(name)
        self._changed()
        if conflicts:  # strict: every target has been settled before the first of them is raised
            raise ActivationError("\n".join(conflicts))

    def _decide_gates(self) -> None:
        """Decide the gates whose packages are there, and say what they found.

        Installers and other tools are Pythons of an environment, too: what never imports torch gets no advice about kernels.
        """
        try:
            tree = CachedTree(self._tree)
            self._note(self._gates_that_are_there(tree), tree)
        except Exception as error:  # noqa: BLE001 - importing torch must not fail for us; the first target and an audit ask again
            self.log.gates_undecided(error)

    @contextlib.contextmanager
    def _one_heap_walk(self) -> Iterator[None]:
        """Let all overlays that are settled in the block share one walk over the heap."""
        if not self._declared.are_loaded:  # no target is there, so nothing is settled late
            yield
            return
        from megacpp_overlays.loader.heap import HeapSnapshot

        self._heap = HeapSnapshot(self._replaceable)
        try:
            yield
        finally:
            self._heap = None

    def _forget_heap(self) -> None:
        """Have the heap walked anew: names that led to a seam lead to its original again, which no snapshot knows."""
        if self._heap is not None:
            self._heap.forget()

    def _replaceable(self) -> Iterator[object]:
        """Yield every function that an overlay may replace, as its target has it now, and what it is wrapped in there."""
        from megacpp_overlays.loader import reached

        for overlay in self._declared.overlays:
            yield from reached.replaceable(overlay)

    def _say_what_waits(self) -> None:
        if self._has_said_what_waits:
            return
        self._has_said_what_waits = True
        off = [each for each in self._declared.listed if is_off(each, self.settings)]
        waiting = [each.id for each in self._declared.listed if each.installs and each not in off]
        self.log.armed(waiting, [each.id for each in off if not each.off_by_default])

    def _gates_that_are_there(self, tree: SourceTree) -> list[Erratum]:
        """Return the gates that may have something to say; the others are asked with the first target, or by an audit."""
        gates = [each for each in self._declared.listed if not each.installs and not is_off(each, self.settings)]
        there = [each for each in gates if any(_may_be_there(name, tree) for name in each.targets)]
        return [part for each in there for part in registry.one(each.id)]

    def _complete(self, tree: SourceTree | None = None) -> bool:
        """Note what is known of every overlay before its target is imported; return whether that was still to do.

        Raises:
            RegistryError: see `overlays`.
        """
        missing = [each for each in self.overlays if each not in self._parts]
        if missing:
            self._gates_looked = self._where_gates_look()
        self._note(missing, tree or CachedTree(self._tree))
        return bool(missing)

    def _note(self, errata: Sequence[Erratum], tree: SourceTree) -> None:
        # setdefault: another thread may be arming too, and may have settled a target already.
        waiting = [PartState(self._first_record(each, tree)) for each in errata if each not in self._parts]
        fresh = [part.record for part in waiting if self._parts.setdefault(part.record.overlay, part) is part]
        self.log.gates([record for record in fresh if not record.overlay.installs])

    def _begin_again(self, erratum: Erratum, tree: SourceTree) -> None:
        """Let what was undone be settled anew."""
        part = self._part(erratum)
        if isinstance(erratum, Overlay):
            part.change = PartChange.ARMED_AGAIN
        part.record = self._first_record(erratum, tree)
        part.is_undone = False

    def _settle_again(self, name: str) -> None:
        """Settle what was undone, what was interrupted, and what is upstream's own again."""
        turn = self._turns.at(name)
        if not turn.take():
            return  # another thread is at it
        try:
            module = sys.modules.get(name)
            is_there = module is not None and not is_half_imported(module)
            about = [(each, self._part(each)) for each in self._about(name)]
            for _, part in about:
                if not is_there and not part.is_placed:
                    part.change = None  # it waits for the import, as if nothing had been
            chosen = [each for each, part in about if part.is_settled_by_arming or self._has_changed(each)]
            if module is not None and is_there and chosen:
                self._settle_all(name, chosen, module, late=True)
        finally:
            turn.give_back()

    def _has_changed(self, overlay: Overlay) -> bool:
        """Return whether upstream's own code is live where a seam was, or a seam where none should be."""
        part = self._part(overlay)
        if not part.is_placed or before_import(overlay, self.settings).decision is Decision.DISABLED:
            return False
        from megacpp_overlays.loader import reached

        if part.is_active:
            return reached.resolve_symbols(overlay, part.record.shape, explain=True).upstreams_own
        return bool(reached.resolve_symbols(overlay).seams)

    def _first_record(self, erratum: Erratum, tree: SourceTree) -> Record:
        """Return what is known of an overlay before its target is imported, and all there is to know of a gate."""
        record = before_import(erratum, self.settings)
        if isinstance(erratum, Gate) and record.decision is Decision.ARMED:  # one that is switched off is not asked
            from megacpp_overlays.loader import probing

            return probing.assess_gate(erratum, self.settings, tree)
        return record

    def _settle_gates_that_saw_nothing(self) -> None:
        """Ask the gates again whose packages were not there: a launcher may have completed its path since.

        And those that look repaired: that may have been witnessed since.
        """
        self._gates_looked = self._where_gates_look()
        tree = CachedTree(self._tree)
        for gate in self._declared.gates:
            part = self._parts.get(gate)
            if part is not None and derived_records.may_be_answered_now(part.record):
                found = self._first_record(gate, tree)
                if found.decision is not part.record.decision:
                    part.record = found
                    self.log.gates([found])

    def _where_gates_look(self) -> tuple[object, ...]:
        """Return what decides where a package is found; while it stays, only an audit asks for one that was not there."""
        modules = {name for each in self._declared.listed if not each.installs for name in each.targets}
        parents = {name.partition(".")[0] for name in modules}
        loaded = frozenset((modules | parents) & sys.modules.keys())
        finders = [each for each in sys.meta_path if type(each).__module__.partition(".")[0] not in _OURS]
        return tuple(sys.path), tuple(map(id, finders)), loaded

    def loaded(self, name: str, module: ModuleType, *, late: bool) -> None:
        """Settle the overlays whose target is this module (called by the hooks).

        Args:
            name: the name under which it was watched.
            module: the module, complete.
            late: see `install.Circumstances`.

        Raises:
            ActivationError: `strict` is on and one of them ended in conflict.
        """
        try:
            if not self._complete() and self._where_gates_look() != self._gates_looked:
                self._settle_gates_that_saw_nothing()
        except Exception as error:  # nobody could say what this module needs, so somebody has to be told
            self.log.not_loaded(name, error)
            if self.settings.mode is Mode.STRICT:
                raise ActivationError(f"the overlays of {name} cannot be loaded: {error!r}") from error
            return
        self._settle_all(name, self._about(name), module, late=late)

    def _settle_all(self, name: str, overlays: Sequence[Overlay], module: ModuleType, *, late: bool) -> None:
        """Settle overlays of one target, but for those that are undone."""
        with self._turns.at(name):
            chosen = [overlay for overlay in overlays if not self._part(overlay).is_undone]
            settled = [self._settle(overlay, module, late=late) for overlay in chosen]
            settled += [self._withdraw(overlay, why) for overlay in chosen if (why := self._lost(overlay))]
        settled += self._withdraw_what_needs(chosen)
        if self.settings.mode is Mode.STRICT:
            raise_for([record for record in settled if record.decision in UNDECIDED])

    def failed(self, name: str, error: Exception) -> None:
        """Record that the loader itself failed on a module (called by the hooks)."""
        for overlay in self._about(name):
            part = self._part(overlay)
            if part.change is not None or part.record.decision is Decision.ARMED:
                part.is_short_of_memory |= isinstance(error, MemoryError)
                self._keep(derived_records.conflict(before_import(overlay, self.settings), error))
        self._withdraw_what_needs(self._about(name))

    def _standing(self, needed: Overlay, tree: SourceTree) -> Record:
        """Return what an overlay that another one needs is now, or what it would be; see `needs`."""
        from megacpp_overlays.loader import needs

        part = self._part(needed)
        if needs.is_known(part.record):
            return self._review(part.record)
        part.expected = needs.expected(part.record, self.settings, tree)
        return part.expected

    def _unmet(self, overlay: Overlay, tree: SourceTree) -> str:
        """Return why an overlay must not be in, for the sake of what it needs; an empty text if it may."""
        if not (overlay.needs or overlay.needs_parts):
            return ""
        from megacpp_overlays.loader import needs

        standing = [self._standing(part, tree) for part in needs.parts(overlay, self._declared.overlays)]
        if why := needs.unmet(standing, overlay):
            return why
        for record in standing:
            module = sys.modules.get(record.overlay.target.module)
            settled = needs.is_known(record) and record is not self._part(record.overlay).expected
            if settled and module is not None and (why := needs.misbehaves(record, module)):
                return why
        return ""

    def _withdraw_what_needs(self, changed: Sequence[Erratum]) -> list[Record]:
        """Take out what needs one of these overlays and has lost it; return what became of it."""
        withdrawn: list[Record] = []
        for overlay in dict.fromkeys(
            each for each in self._declared.overlays for one in changed if each.depends_on(one)
        ):
            # A thread that is settling it asks the same once more when it is done, so there is no need to wait for it.
            if (why := self._lost(overlay)) and not self._turns.at(overlay.target.module).is_taken():
                withdrawn += [self._withdraw(overlay, why), *self._withdraw_what_needs([overlay])]
        return withdrawn

    def _withdraw_over_foreign_code(self) -> None:
        """Take out each active overlay whose finding was read from a definition that is another library's now.

        With that code in the place of upstream's, a correction of ours may be made twice.
        """
        for overlay in self._declared.overlays:
            if why := self._foreign_code_under(overlay):
                self._withdraw(overlay, why)
                self._withdraw_what_needs([overlay])

    def _foreign_code_under(self, overlay: Overlay) -> str:
        """Return which definition under an active overlay is another library's, in words."""
        part = self._part(overlay)
        if not part.is_active or self._turns.at(overlay.target.module).is_taken():
            return ""
        from megacpp_overlays.loader import probing

        held = probing.held_against_its_readings(part.record)
        return held.reason if held is not part.record else ""

    def _is_over_foreign_code(self, overlay: Overlay) -> bool:
        """Return whether a seam must not be used, and take it out then; asked before its first call.

        Raises:
            ActivationError: it must not, and `strict` is on.
        """
        from megacpp_overlays.runtime import dynamo

        try:
            if not (why := self._foreign_code_under(overlay)):
                return False
            dynamo.check()  # while a caller is traced nothing can be changed; the next audit says so
            withdrawn = [self._withdraw(overlay, why), *self._withdraw_what_needs([overlay])]
        except Exception as error:  # noqa: BLE001 - a call of upstream must not fail for us
            self.log.unchecked(overlay, error)
            return False
        if self.settings.mode is Mode.STRICT:
            raise_for(withdrawn)
        return True

    def _lost(self, overlay: Overlay) -> str:
        """Return what an active overlay needs and has lost, in words; no probe is asked."""
        if not (overlay.needs or overlay.needs_parts) or not self._part(overlay).is_active:
            return ""
        from megacpp_overlays.loader import needs

        known = (self._as_last_told(part) for part in needs.parts(overlay, self._declared.overlays))
        return needs.unmet((record for record in known if record is not None), overlay)

    def _withdraw(self, overlay: Overlay, why: str) -> Record:
        """Take out an overlay that would do harm now; it is settled anew when `arm` is called."""
        from megacpp_overlays.loader import install
        from megacpp_overlays.runtime import dynamo

        with self._turns.at(overlay.target.module):
            kept: tuple[str, ...] = ()
            part = self._part(overlay)
            part.begin()
            part.is_refused = True
            try:
                with dynamo.changing(dropped=functools.partial(self.log.dropped, overlay)):
                    problems, kept = install.take_out(overlay, part.written_traces())
                self._forget_heap()
                why = "; ".join([why, *problems])
            except SeamError as error:  # a compiled graph cannot be dropped now
                why, kept = f"{why}; and it cannot be taken out: {error}", part.record.seams
            out = replace(part.record, decision=Decision.CONFLICT, reason=why, seams=kept, rebound=(), around=())
            return self._keep(out)

    def undo(self, overlay_id: str | None = None) -> None:
        """Put back what one overlay, or every overlay, replaced. It stays off until `arm` is called again.

        A launcher may still name an overlay that was retired: it is told so, and goes on.

        Raises:
            SeamError: somebody replaced an attribute after us; the rest is undone, and the overlay is in conflict. Or
                a graph of torch.compile cannot be dropped now, see `compiled`; then everything stays in.
            RegistryError: there is no such overlay.
        """
        self._complete()
        chosen = [overlay for overlay in self.overlays if overlay_id in {None, overlay.id}]
        if overlay_id is not None and not chosen:
            from megacpp_overlays.loader import retired

            if (gone := retired.find(overlay_id)) is not None:
                self.log.retired(f"{gone}: there is nothing to undo")
                return
            from megacpp_overlays.near_names import suggestion

            near = suggestion(overlay_id, sorted({each.id for each in self.overlays}), where="`megacpp-overlays audit`")
            raise RegistryError(f"there is no overlay {overlay_id}; {near}")
        needing = [each for each in self._declared.overlays for one in chosen if each.depends_on(one)]
        if any(self._part(overlay).is_placed for overlay in (*chosen, *needing)):
            from megacpp_overlays.runtime import dynamo

            dynamo.check()
        names = self._names_to_restore(chosen)
        problems = [problem for overlay in chosen if (problem := self._undo_one(overlay, names))]
        problems += [record.reason for record in self._withdraw_what_needs(chosen) if record.seams]
        self._changed()
        if problems:
            raise SeamError("; ".join(problems))

    def _names_to_restore(self, errata: Sequence[Erratum]) -> Sequence[MarkedName] | None:
        """Return the names that lead to seams, found once for all that is undone; None where nothing may be in."""
        if not any(isinstance(each, Overlay) and self._may_be_in(each) for each in errata):
            return None
        from megacpp_overlays.loader import aliases

        return aliases.marked_names()

    def _undo_one(self, erratum: Erratum, names: Sequence[MarkedName] | None = None) -> str:
        """Undo one overlay; return what could not be put back, in words.

        What is in is found in the live process, so that nothing is left in by a call that was interrupted.
        """
        with self._turns.at(erratum.target.module):
            problems: tuple[str, ...] = ()
            kept: tuple[str, ...] = ()
            part = self._part(erratum)
            was_in = False
            if isinstance(erratum, Overlay) and self._may_be_in(erratum):
                from megacpp_overlays.loader import install
                from megacpp_overlays.runtime import dynamo

                was_in = True
                traces = part.written_traces()
                with dynamo.changing(dropped=functools.partial(self.log.dropped, erratum)):
                    part.begin()
                    part.is_undone = True
                    problems, kept = install.take_out(erratum, traces, names)
            part.is_undone = True
            was_in = was_in or part.is_refused
            part.is_refused = False
            if problems:
                part.record = replace(
                    part.record, decision=Decision.CONFLICT, reason="; ".join(problems), seams=kept, rebound=()
                )
            elif derived_records.ends_when_undone(part.record, was_in=was_in):
                part.record = replace(part.record, decision=Decision.DISABLED, reason=_UNDONE, seams=(), rebound=())
            part.change = None
            return "; ".join(problems)

    def _may_be_in(self, overlay: Overlay) -> bool:
        """Return whether anything may have to be put back."""
        part = self._part(overlay)
        if part.change is not None or part.is_placed or part.has_seams:
            return True
        if overlay.target.module not in sys.modules:
            return False
        from megacpp_overlays.loader import reached

        return bool(reached.resolve_symbols(overlay).seams)

    def audit(self, *, deep: bool = False) -> Audit:
        """Return all decisions as they stand now, and settle what no hook heard of; it does not raise for a conflict.

        Each seam is looked up in the live process, so whatever was replaced since is noticed here, and a target that is
        not there at all.

        Args:
            deep: whether to walk over the heap too, for what holds an original where no name leads.
        """
        if not self._complete():
            self._settle_gates_that_saw_nothing()
        self._settle_missed_imports()
        self._withdraw_over_foreign_code()
        found = self.audit_as_it_stands(deep=deep)
        self._tree.forget()
        return found

    def audit_as_it_stands(self, *, deep: bool = False) -> Audit:
        """Return what became of the overlays; nothing is settled that no hook heard of, as when the process ends."""
        return self._audit_of(lambda record: derived_records.with_versions(self._review(record, deep=deep)))

    def audit_so_far(self) -> Audit:
        """Return the decisions as they were taken; looks for nothing and settles nothing, so a hook may ask."""
        self._complete()
        return self._audit_of(lambda record: record if record.decision is Decision.ARMED else self._review(record))

    def _audit_of(self, told: Callable[[Record], Record]) -> Audit:
        records = tuple(told(self._parts[each].record) for each in self.overlays if each in self._parts)
        copies = self._hub_copies()
        return Audit(
            version=VERSION, mode=self.settings.mode.value, settings=self.settings, records=records, hub_copies=copies
        )

    def _hub_copies(self) -> tuple[str, ...]:
        """Look for copies of upstream code that the package `kernels` loaded, and warn of each once."""
        if "kernels" not in sys.modules or self.settings.mode is Mode.OFF:
            return ()
        from megacpp_overlays.loader import hub_copies

        found = hub_copies.find(self.overlays)
        self.log.hub_copies(found)
        return found

    def count_at_exit(self) -> None:
        """Say at the end of the process what became of the overlays, if a target was settled; what an audit told is not repeated."""
        records = [each.record for each in self._parts.values()]
        was_settled = any(each.finding is not None and each.overlay.installs for each in records)
        with contextlib.suppress(
            Exception
        ):  # the interpreter may be half gone: an error here must not change the exit code
            if was_settled and self.log.has_to_count(at_exit=True):
                self.log.count(self.audit_as_it_stands(), at_exit=True)  # which looks for copies of the Hub, too
            else:
                self._hub_copies()

    def _settle_missed_imports(self) -> None:
        """Settle a target that was loaded past every hook, by a loader or a recipe of somebody's own."""
        for name in self._declared.targets:
            module = sys.modules.get(name)
            waits = any(self._part(each).record.decision is Decision.ARMED for each in self._about(name))
            if waits and module is not None and not is_half_imported(module) and self.settings.mode is not Mode.OFF:
                with _collecting([]):  # the audit that asks for this raises for every conflict itself
                    self._hooks.complete(name, module, late=True)

    def _settle(self, overlay: Overlay, module: ModuleType, *, late: bool) -> Record:
        from megacpp_overlays.loader import install, probing

        tree = CachedTree(self._tree)
        part = self._part(overlay)
        traces = part.written_traces()
        is_half_in = part.change is not None or not part.is_active
        placed: list[Seam] = []

        def note(seam: Seam) -> None:
            if not seam.adopted:  # what is another session's is noted when it is verified
                traces.note(seam)
            placed.append(seam)

        part.begin()
        part.is_short_of_memory = False
        record = before_import(overlay, self.settings)
        try:
            if is_half_in and part.is_placed:
                install.take_out(overlay, traces)  # what cannot be put back is refused below, or found to be in
                self._forget_heap()
            traces.forget_what_was_overwritten()
            record = probing.assess_overlay(overlay, module, self.settings, tree)
            part.is_refused = bool(record.around)  # code of another library, which may be gone when this is armed again
            if record.decision is Decision.ACTIVE and (why := self._unmet(overlay, tree)):
                part.is_refused = True
                problems, kept = install.take_out(overlay, traces)
                self._forget_heap()
                record = replace(record, decision=Decision.CONFLICT, reason="; ".join([why, *problems]), seams=kept)
            if record.decision is Decision.ACTIVE:
                dropped = functools.partial(self.log.dropped, overlay)
                circumstances = install.Circumstances(
                    late,
                    part.change is PartChange.ARMED_AGAIN,
                    dropped,
                    note,
                    self._heap,
                    signature=_is_witnessed(record),
                )
                installed = install.install(overlay, record.shape, module, tree, circumstances)
                for seam in installed.seams:
                    traces.note(seam)
                    seam.check_first_call(functools.partial(self._is_over_foreign_code, overlay))
                record = replace(
                    record,
                    seams=tuple(str(seam) for seam in installed.seams),
                    rebound=tuple(str(seam) for seam in installed.rebound),
                )
        except Exception as error:  # noqa: BLE001 - undone already; upstream must go on as if we were not here
            part.is_short_of_memory = isinstance(error, MemoryError)
            with contextlib.suppress(SeamError):
                install.undo_all([seam for seam in placed if not seam.adopted])
            self._forget_heap()
            traces.forget_what_was_overwritten()
            left = tuple(str(seam) for seam in placed if seam.in_place)
            record = replace(derived_records.conflict(record, error), seams=left, rebound=())
        return self._keep(record)

    def _keep(self, record: Record) -> Record:
        part = self._part(record.overlay)
        part.record = record
        part.change = None
        self.log.decided(record)
        if record.decision is Decision.ACTIVE and self.when_active is not None and self.when_active(record):
            self.when_active = None
        self._changed()
        return record

    def _changed(self) -> None:
        if self.when_changed is not None:
            self.when_changed()

    def _review(self, record: Record, *, deep: bool = False) -> Record:
        """Return a record as it is true now."""
        overlay = record.overlay
        if not isinstance(overlay, Overlay):
            return record
        part = self._part(overlay)
        if part.change is not None:
            if self._turns.at(overlay.target.module).is_taken():
                return record  # another thread is at it
            return replace(record, decision=Decision.CONFLICT, reason=_INTERRUPTED)
        if overlay.target.module not in sys.modules:
            return derived_records.if_absent(record, self._tree) if record.decision is Decision.ARMED else record
        from megacpp_overlays.loader import review

        reviewed = review.review(record, overlay, part.traces, deep=deep)
        if reviewed.decision is Decision.ACTIVE and (why := self._lost(overlay)):
            return replace(reviewed, decision=Decision.CONFLICT, reason=why)
        return reviewed

    def _as_last_told(self, needed: Overlay) -> Record | None:
        """Return what an overlay that another one needs is, or what it was expected to be; None where nobody asked."""
        from megacpp_overlays.loader import needs

        part = self._part(needed)
        return self._review(part.record) if part.is_undone or needs.is_known(part.record) else part.expected


def _may_be_there(name: str, tree: SourceTree) -> bool:
    try:
        return tree.module(name) is not None
    except Exception:  # noqa: BLE001 - it is there, or somebody's finder raises: the gate will say
        return True


@contextlib.contextmanager
def _collecting(conflicts: list[str]) -> Iterator[None]:
    try:
        yield
    except ActivationError as error:
        conflicts.append(str(error))


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


def _is_witnessed(record: Record) -> bool:
    """Return whether it was the reproducer that said what is broken, and not the probe."""
    return record.finding is not None and record.finding.proof is not None
