"""First records: overlays wait for the import of their target, and gates are read from source before any import.

A gate whose package was not there is asked again when the path of this process has changed, and in every audit. Most
processes have no gate to ask, so the one that does imports what asks.
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
"""Packages of finders that find nothing on their own."""


def note_all(state: SessionState, tree: SourceTree | None = None) -> bool:
    """Note the first record of every overlay and gate that has none; return whether any had none.

    Raises:
        RegistryError: see `SessionState.overlays`.
    """
    missing = [each for each in state.overlays if each not in state.parts]
    if missing:
        state.gates_looked = _where_gates_look(state.declared)
    _note(state, missing, tree or state.tree())
    return bool(missing)


def note_gates_that_are_there(state: SessionState) -> None:
    """Decide the gates whose packages are there, and say what they found.

    Installers and other tools are Pythons of an environment, too. A process that never imports torch gets no advice about
    kernels.
    """
    try:
        tree = state.tree()
        gates = [each for each in state.declared.listed if not each.installs and not is_off(each, state.settings)]
        there = [each for each in gates if any(_may_be_there(name, tree) for name in each.targets)]
        _note(state, [part for each in there for part in registry.one(each.id)], tree)
    except Exception as error:  # noqa: BLE001 - importing torch must not fail for us; the first target and an audit ask again
        state.log.gates_undecided(error)


def _note(state: SessionState, errata: Sequence[Erratum], tree: SourceTree) -> None:
    # setdefault: another thread may be arming too, and may have settled a target already.
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
    """Ask gates again where packages may be found now that were not there before."""
    if _where_gates_look(state.declared) != state.gates_looked:
        ask_gates_again(state)


def ask_gates_again(state: SessionState) -> None:
    """Ask the gates again whose packages were not there: a launcher may have completed its path since.

    And those that look repaired: that may have been witnessed since.
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
    """Return what decides where a package is found; while it stays, only an audit asks for one that was not there."""
    modules = {name for each in declared.listed if not each.installs for name in each.targets}
    parents = {name.partition(".")[0] for name in modules}
    loaded = frozenset((modules | parents) & sys.modules.keys())
    finders = [each for each in sys.meta_path if type(each).__module__.partition(".")[0] not in _OURS]
    return tuple(sys.path), tuple(map(id, finders)), loaded


def _may_be_there(name: str, tree: SourceTree) -> bool:
    try:
        return tree.module(name) is not None
    except Exception:  # noqa: BLE001 - it is there, or a third-party finder raises: the gate will say
        return True
