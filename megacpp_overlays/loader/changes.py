"""Installation, withdrawal and undoing of the overlays of a target, each under the lock of the target.

`PartState.change` is set before the first effect and cleared after the last, so an interrupted change can be detected.
The seams to take out are found in the running process by their marks, and not from stored state.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from types import ModuleType

from megacpp_overlays.errors import SeamError
from megacpp_overlays.frozen import replace
from megacpp_overlays.loader import aliases, derived_records, install, probing, reached, standing
from megacpp_overlays.loader.aliases import MarkedName
from megacpp_overlays.loader.audit import raise_for
from megacpp_overlays.loader.decide import before_import
from megacpp_overlays.loader.part_state import PartChange
from megacpp_overlays.loader.seams import Seam
from megacpp_overlays.loader.session_state import SessionState
from megacpp_overlays.loader.settings import Mode
from megacpp_overlays.loader.target_locks import changes_target
from megacpp_overlays.model import UNDECIDED, Decision, Erratum, Overlay, Record
from megacpp_overlays.runtime import dynamo

_UNDONE = "undone in this process"


@changes_target
def apply_all(state: SessionState, name: str, overlays: Sequence[Overlay], module: ModuleType, *, late: bool) -> None:
    """Decide and install the overlays of one target, except those that are undone.

    Args:
        state: of the session.
        name: of the target.
        overlays: all overlays of this target.
        module: the target, executed to its end.
        late: see `install.Circumstances`.

    Raises:
        ActivationError: `strict` is on, and an overlay is undecided.
    """
    with state.locks.at(name):
        chosen = [overlay for overlay in overlays if not state.part(overlay).is_undone]
        settled = [apply(state, overlay, module, late=late) for overlay in chosen]
        settled += [withdraw(state, overlay, why) for overlay in chosen if (why := standing.lost(state, overlay))]
    settled += withdraw_dependents(state, chosen)
    if state.settings.mode is Mode.STRICT:
        raise_for([record for record in settled if record.decision in UNDECIDED])


def apply(state: SessionState, overlay: Overlay, module: ModuleType, *, late: bool) -> Record:
    """Probe a target, install the overlay if the decision is `ACTIVE`, and keep its record."""
    tree = state.tree()
    part = state.part(overlay)
    traces = part.written_traces()
    is_half_in = part.change is not None or not part.is_active
    placed: list[Seam] = []
    part.begin()
    part.is_short_of_memory = False
    record = before_import(overlay, state.settings)
    try:
        if is_half_in and part.is_placed:
            install.take_out(overlay, traces)  # a seam that cannot be taken out is refused below, or found in place
            state.forget_heap()
        traces.forget_overwritten()
        record = probing.assess_overlay(overlay, module, state.settings, tree)
        part.is_refused = bool(record.around)  # third-party code, which may be gone at the next arming
        if record.decision is Decision.ACTIVE and (why := standing.unmet(state, overlay, tree)):
            record = _refused(state, overlay, record, why)
        if record.decision is Decision.ACTIVE:
            circumstances = _circumstances(state, record, placed, late=late)
            installed = install.install(overlay, record.shape, module, tree, circumstances)
            record = _as_installed(state, overlay, record, installed)
    except Exception as error:  # noqa: BLE001 - undone already; upstream must go on without the overlay
        record = _rolled_back(state, record, placed, error)
    return state.keep(record)


def _refused(state: SessionState, overlay: Overlay, record: Record, why: str) -> Record:
    """Take out an overlay that must not be installed; return its conflict."""
    part = state.part(overlay)
    part.is_refused = True
    problems, kept = install.take_out(overlay, part.written_traces())
    state.forget_heap()
    return replace(record, decision=Decision.CONFLICT, reason="; ".join([why, *problems]), seams=kept)


def _circumstances(state: SessionState, record: Record, placed: list[Seam], *, late: bool) -> install.Circumstances:
    """Return the circumstances for `install`, which append each seam to `placed` before it is installed."""
    part = state.part(record.overlay)
    traces = part.written_traces()

    def note(seam: Seam) -> None:
        if not seam.adopted:  # a seam of another session is noted when it is verified
            traces.note(seam)
        placed.append(seam)

    return install.Circumstances(
        late,
        part.change is PartChange.ARMED_AGAIN,
        functools.partial(state.log.dropped, record.overlay),
        note,
        state.heap,
        signature=_is_witnessed(record),
    )


def _as_installed(state: SessionState, overlay: Overlay, record: Record, installed: install.PlacedSeams) -> Record:
    """Return the record of an installed overlay, and set a check of each seam before its first call."""
    for seam in installed.seams:
        state.part(overlay).written_traces().note(seam)
        seam.check_first_call(functools.partial(is_refused_at_first_call, state, overlay))
    return replace(
        record,
        seams=tuple(str(seam) for seam in installed.seams),
        rebound=tuple(str(seam) for seam in installed.rebound),
    )


def _rolled_back(state: SessionState, record: Record, placed: Sequence[Seam], error: Exception) -> Record:
    """Take out the placed seams after an error; return the conflict."""
    part = state.part(record.overlay)
    part.is_short_of_memory = isinstance(error, MemoryError)
    with contextlib.suppress(SeamError):
        install.undo_all([seam for seam in placed if not seam.adopted])
    state.forget_heap()
    part.written_traces().forget_overwritten()
    left = tuple(str(seam) for seam in placed if seam.in_place)
    return replace(derived_records.conflict(record, error), seams=left, rebound=())


def _is_witnessed(record: Record) -> bool:
    """Return whether the finding comes from the reproducer and not from the probe."""
    return record.finding is not None and record.finding.proof is not None


@changes_target
def withdraw(state: SessionState, overlay: Overlay, why: str) -> Record:
    """Take out an overlay that would do harm now; the next call of `arm` decides it again."""
    with state.lock_of(overlay):
        kept: tuple[str, ...] = ()
        part = state.part(overlay)
        part.begin()
        part.is_refused = True
        try:
            with dynamo.changing(dropped=functools.partial(state.log.dropped, overlay)):
                problems, kept = install.take_out(overlay, part.written_traces())
            state.forget_heap()
            why = "; ".join([why, *problems])
        except SeamError as error:  # a compiled graph cannot be dropped now
            why, kept = f"{why}; and it cannot be taken out: {error}", part.record.seams
        out = replace(part.record, decision=Decision.CONFLICT, reason=why, seams=kept, rebound=(), around=())
        return state.keep(out)


def withdraw_dependents(state: SessionState, changed: Sequence[Erratum]) -> list[Record]:
    """Withdraw each overlay that depends on a changed one and has lost that dependency; return the records."""
    withdrawn: list[Record] = []
    for overlay in dict.fromkeys(each for each in state.declared.overlays for one in changed if each.depends_on(one)):
        # A thread that is deciding the overlay checks this again when it is done, so there is no need to wait for it.
        if (why := standing.lost(state, overlay)) and not state.lock_of(overlay).is_taken():
            withdrawn += [withdraw(state, overlay, why), *withdraw_dependents(state, [overlay])]
    return withdrawn


def withdraw_over_foreign_code(state: SessionState) -> None:
    """Withdraw each active overlay whose finding was read from a definition that another library has replaced."""
    for overlay in state.declared.overlays:
        if why := standing.foreign_code_under(state, overlay):
            withdraw(state, overlay, why)
            withdraw_dependents(state, [overlay])


def is_refused_at_first_call(state: SessionState, overlay: Overlay) -> bool:
    """Withdraw an overlay if its seam lies over foreign code, and return whether it does; called before the first call of a seam.

    Raises:
        ActivationError: the seam lies over foreign code, and `strict` is on.
    """
    try:
        if not (why := standing.foreign_code_under(state, overlay)):
            return False
        dynamo.check()  # nothing can be changed while a caller is traced; the next audit reports it
        withdrawn = [withdraw(state, overlay, why), *withdraw_dependents(state, [overlay])]
    except Exception as error:  # noqa: BLE001 - a call of upstream must not fail because of this check
        state.log.unchecked(overlay, error)
        return False
    if state.settings.mode is Mode.STRICT:
        raise_for(withdrawn)
    return True


def undo_all(state: SessionState, errata: Sequence[Erratum]) -> list[str]:
    """Undo parts, and withdraw overlays that depend on them; return a message for each one that could not be restored.

    Raises:
        SeamError: a graph of torch.compile cannot be dropped now; then everything stays installed.
    """
    needing = [each for each in state.declared.overlays for one in errata if each.depends_on(one)]
    if any(state.part(overlay).is_placed for overlay in (*errata, *needing)):
        dynamo.check()
    # One search for all parts that are undone.
    names = aliases.marked_names() if any(_may_be_in(state, each) for each in errata) else None
    problems = [problem for each in errata if (problem := _undo(state, each, names))]
    return problems + [record.reason for record in withdraw_dependents(state, errata) if record.seams]


@changes_target
def _undo(state: SessionState, erratum: Erratum, names: Sequence[MarkedName] | None) -> str:
    """Undo one part; return a message if it could not be restored, else an empty text."""
    with state.lock_of(erratum):
        problems: tuple[str, ...] = ()
        kept: tuple[str, ...] = ()
        part = state.part(erratum)
        was_in = False
        if isinstance(erratum, Overlay) and _may_be_in(state, erratum):
            was_in = True
            traces = part.written_traces()
            with dynamo.changing(dropped=functools.partial(state.log.dropped, erratum)):
                part.begin()
                part.is_undone = True
                problems, kept = install.take_out(erratum, traces, names)
        part.is_undone = True
        was_in = was_in or part.is_refused
        part.is_refused = False
        if problems:
            reason = "; ".join(problems)
            part.record = replace(part.record, decision=Decision.CONFLICT, reason=reason, seams=kept, rebound=())
        elif derived_records.ends_when_undone(part.record, was_in=was_in):
            part.record = replace(part.record, decision=Decision.DISABLED, reason=_UNDONE, seams=(), rebound=())
        part.change = None
        return "; ".join(problems)


def _may_be_in(state: SessionState, erratum: Erratum) -> bool:
    """Return whether a part may have seams to take out."""
    if not isinstance(erratum, Overlay):
        return False
    part = state.part(erratum)
    return part.change is not None or part.is_placed or part.has_seams or bool(reached.resolve_symbols(erratum).seams)
