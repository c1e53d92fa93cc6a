"""Change what a target has: put overlays in, withdraw them, and undo them, each under the lock of its target.

`PartState.change` is set before the first effect and cleared after the last, so a change that was interrupted is known.
What has to be put back is found in the running process by marks, and not by what was remembered.
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
    """Settle overlays of one target, but for those that are undone.

    Args:
        state: of the session.
        name: of the target.
        overlays: all of this target.
        module: the target, complete.
        late: see `install.Circumstances`.

    Raises:
        ActivationError: `strict` is on, and one of them is undecided.
    """
    with state.locks.at(name):
        chosen = [overlay for overlay in overlays if not state.part(overlay).is_undone]
        settled = [apply(state, overlay, module, late=late) for overlay in chosen]
        settled += [withdraw(state, overlay, why) for overlay in chosen if (why := standing.lost(state, overlay))]
    settled += withdraw_dependents(state, chosen)
    if state.settings.mode is Mode.STRICT:
        raise_for([record for record in settled if record.decision in UNDECIDED])


def apply(state: SessionState, overlay: Overlay, module: ModuleType, *, late: bool) -> Record:
    """Probe a target, and put the overlay in where the decision is to do so; keep the record of it."""
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
            install.take_out(overlay, traces)  # what cannot be put back is refused below, or found to be in
            state.forget_heap()
        traces.forget_what_was_overwritten()
        record = probing.assess_overlay(overlay, module, state.settings, tree)
        part.is_refused = bool(record.around)  # code of another library, which may be gone when this is armed again
        if record.decision is Decision.ACTIVE and (why := standing.unmet(state, overlay, tree)):
            record = _refused(state, overlay, record, why)
        if record.decision is Decision.ACTIVE:
            circumstances = _circumstances(state, record, placed, late=late)
            installed = install.install(overlay, record.shape, module, tree, circumstances)
            record = _as_installed(state, overlay, record, installed)
    except Exception as error:  # noqa: BLE001 - undone already; upstream must go on as if we were not here
        record = _rolled_back(state, record, placed, error)
    return state.keep(record)


def _refused(state: SessionState, overlay: Overlay, record: Record, why: str) -> Record:
    """Return the conflict of an overlay that must not be in, and take it out."""
    part = state.part(overlay)
    part.is_refused = True
    problems, kept = install.take_out(overlay, part.written_traces())
    state.forget_heap()
    return replace(record, decision=Decision.CONFLICT, reason="; ".join([why, *problems]), seams=kept)


def _circumstances(state: SessionState, record: Record, placed: list[Seam], *, late: bool) -> install.Circumstances:
    """Return what `install` has to know; `placed` gets each seam before it goes in."""
    part = state.part(record.overlay)
    traces = part.written_traces()

    def note(seam: Seam) -> None:
        if not seam.adopted:  # one of another session is noted when it is verified
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
    """Return the record of what is in, and have each seam checked before its first call."""
    for seam in installed.seams:
        state.part(overlay).written_traces().note(seam)
        seam.check_first_call(functools.partial(is_refused_at_first_call, state, overlay))
    return replace(
        record,
        seams=tuple(str(seam) for seam in installed.seams),
        rebound=tuple(str(seam) for seam in installed.rebound),
    )


def _rolled_back(state: SessionState, record: Record, placed: Sequence[Seam], error: Exception) -> Record:
    """Return the conflict that an error ended in, and take out what was placed."""
    part = state.part(record.overlay)
    part.is_short_of_memory = isinstance(error, MemoryError)
    with contextlib.suppress(SeamError):
        install.undo_all([seam for seam in placed if not seam.adopted])
    state.forget_heap()
    part.written_traces().forget_what_was_overwritten()
    left = tuple(str(seam) for seam in placed if seam.in_place)
    return replace(derived_records.conflict(record, error), seams=left, rebound=())


def _is_witnessed(record: Record) -> bool:
    """Return whether the reproducer found the defect, and not the probe."""
    return record.finding is not None and record.finding.proof is not None


@changes_target
def withdraw(state: SessionState, overlay: Overlay, why: str) -> Record:
    """Take out an overlay that would do harm now; it is settled anew when `arm` is called."""
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
    """Withdraw each overlay that needs one of these and has lost it; return the records."""
    withdrawn: list[Record] = []
    for overlay in dict.fromkeys(each for each in state.declared.overlays for one in changed if each.depends_on(one)):
        # A thread that is settling it asks the same once more when it is done, so there is no need to wait for it.
        if (why := standing.lost(state, overlay)) and not state.lock_of(overlay).is_taken():
            withdrawn += [withdraw(state, overlay, why), *withdraw_dependents(state, [overlay])]
    return withdrawn


def withdraw_over_foreign_code(state: SessionState) -> None:
    """Withdraw each active overlay whose finding was read from a definition that is another library's now."""
    for overlay in state.declared.overlays:
        if why := standing.foreign_code_under(state, overlay):
            withdraw(state, overlay, why)
            withdraw_dependents(state, [overlay])


def is_refused_at_first_call(state: SessionState, overlay: Overlay) -> bool:
    """Return whether a seam lies over foreign code, and withdraw its overlay then; asked before its first call.

    Raises:
        ActivationError: it does, and `strict` is on.
    """
    try:
        if not (why := standing.foreign_code_under(state, overlay)):
            return False
        dynamo.check()  # while a caller is traced nothing can be changed; the next audit says so
        withdrawn = [withdraw(state, overlay, why), *withdraw_dependents(state, [overlay])]
    except Exception as error:  # noqa: BLE001 - a call of upstream must not fail for us
        state.log.unchecked(overlay, error)
        return False
    if state.settings.mode is Mode.STRICT:
        raise_for(withdrawn)
    return True


def undo_all(state: SessionState, errata: Sequence[Erratum]) -> list[str]:
    """Undo parts, and withdraw what needs them; return what could not be put back, in words.

    Raises:
        SeamError: a graph of torch.compile cannot be dropped now; then everything stays in.
    """
    needing = [each for each in state.declared.overlays for one in errata if each.depends_on(one)]
    if any(state.part(overlay).is_placed for overlay in (*errata, *needing)):
        dynamo.check()
    # Found once for all that is undone.
    names = aliases.marked_names() if any(_may_be_in(state, each) for each in errata) else None
    problems = [problem for each in errata if (problem := _undo(state, each, names))]
    return problems + [record.reason for record in withdraw_dependents(state, errata) if record.seams]


@changes_target
def _undo(state: SessionState, erratum: Erratum, names: Sequence[MarkedName] | None) -> str:
    """Undo one part; return what could not be put back, in words."""
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
    """Return whether anything of a part may have to be put back."""
    if not isinstance(erratum, Overlay):
        return False
    part = state.part(erratum)
    return part.change is not None or part.is_placed or part.has_seams or bool(reached.resolve_symbols(erratum).seams)
