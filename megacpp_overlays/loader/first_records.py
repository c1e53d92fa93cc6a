"""First records: overlays wait for the import of their target; gates are decided from source, without such an import.

A gate whose package was missing is decided again when the path of this process has changed, and in every audit. Most
processes have no gate to decide, so the modules for it are imported on demand.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megacpp_overlays.loader import derived_records, registry
from megacpp_overlays.loader.decide import before_import, is_off
from megacpp_overlays.loader.declarations import Declarations
from megacpp_overlays.loader.part_state import PartState
from megacpp_overlays.loader.session_state import SessionState
from megacpp_overlays.model import Decision, Erratum, Gate, Record
from megacpp_overlays.source.trees import SourceTree

_OURS = {"megacpp_overlays", "wrapt"}
"""Packages whose finders only delegate to other finders."""


def note_all(state: SessionState, tree: SourceTree | None = None) -> bool:
    """Create the first record of every overlay and gate that has none; return whether there was such a one.

    Raises:
        RegistryError: see `SessionState.overlays`.
    """
    missing = [each for each in state.overlays if each not in state.parts]
    if missing:
        state.gates_looked = _where_gates_look(state.declared)
    _note(state, missing, tree or state.tree())
    return bool(missing)


def note_gates_that_are_there(state: SessionState) -> None:
    """Decide the gates whose packages are installed, and log their findings.

    It is called when torch is imported: installers and other tools of an environment are Python processes, too, and a process
    that never imports torch needs no advice about kernels.
    """
    try:
        tree = state.tree()
        gates = [each for each in state.declared.listed if not each.installs and not is_off(each, state.settings)]
        there = [each for each in gates if any(_may_be_there(name, tree) for name in each.targets)]
        _note(state, [part for each in there for part in registry.one(each.id)], tree)
    except Exception as error:  # noqa: BLE001 - the import of torch must not fail; the first target and an audit decide them again
        state.log.gates_undecided(error)


def _note(state: SessionState, errata: Sequence[Erratum], tree: SourceTree) -> None:
    # setdefault: another thread may be arming too, and may have decided a target already.
    waiting = [PartState(first_record(state, each, tree)) for each in errata if each not in state.parts]
    fresh = [part.record for part in waiting if state.parts.setdefault(part.record.overlay, part) is part]
    state.log.gates([record for record in fresh if not record.overlay.installs])


def first_record(state: SessionState, erratum: Erratum, tree: SourceTree) -> Record:
    """Return the record of an overlay before its target is imported, and the only record of a gate."""
    record = before_import(erratum, state.settings)
    if isinstance(erratum, Gate) and record.decision is Decision.ARMED:  # one that is switched off is not asked
        from megacpp_overlays.loader import probing

        return probing.assess_gate(erratum, state.settings, tree)
    return record


def ask_gates_if_moved(state: SessionState) -> None:
    """Decide gates again if the search path for packages has changed."""
    if _where_gates_look(state.declared) != state.gates_looked:
        ask_gates_again(state)


def ask_gates_again(state: SessionState) -> None:
    """Decide the gates again whose packages were missing or look repaired.

    A launcher may have completed its path since, and a witness may have been kept since.
    """
    state.gates_looked = _where_gates_look(state.declared)
    tree = state.tree()
    for gate in state.declared.gates:
        part = state.parts.get(gate)
        if part is not None and derived_records.may_be_answered_now(part.record):
            found = first_record(state, gate, tree)
            if found.decision is not part.record.decision:
                part.record = found
                state.log.gates([found])


def _where_gates_look(declared: Declarations) -> tuple[object, ...]:
    """Return a key of the search for packages. While it is the same, only an audit looks for a missing package again."""
    modules = {name for each in declared.listed if not each.installs for name in each.targets}
    parents = {name.partition(".")[0] for name in modules}
    loaded = frozenset((modules | parents) & sys.modules.keys())
    finders = [each for each in sys.meta_path if type(each).__module__.partition(".")[0] not in _OURS]
    return tuple(sys.path), tuple(map(id, finders)), loaded


def _may_be_there(name: str, tree: SourceTree) -> bool:
    try:
        return tree.module(name) is not None
    except Exception:  # noqa: BLE001 - the module exists, or a third-party finder raises: the gate reports it
        return True
