"""Current records of a session, and the state of the dependencies between overlays.

This module changes nothing. `changes` takes out an overlay that has lost a dependency, or that lies over foreign code. The
modules that examine a loaded target are imported once there is one.
"""

from __future__ import annotations

import sys

from megacpp_overlays.frozen import replace
from megacpp_overlays.loader import derived_records, needs, probing
from megacpp_overlays.loader.session_state import SessionState
from megacpp_overlays.model import Decision, Overlay, Record
from megacpp_overlays.source.trees import SourceTree

_INTERRUPTED = (
    "it was interrupted while it was put in or taken out, and may be in by halves; call megacpp_overlays.arm() or "
    "megacpp_overlays.undo() again"
)


def reviewed(state: SessionState, record: Record, *, deep: bool = False) -> Record:
    """Return the current form of a record.

    Args:
        state: of the session.
        record: the record of the decision.
        deep: see `review.review`.
    """
    overlay = record.overlay
    if not isinstance(overlay, Overlay):
        return record
    part = state.part(overlay)
    if part.change is not None:
        if state.lock_of(overlay).is_taken():
            return record  # another thread is changing this target
        return replace(record, decision=Decision.CONFLICT, reason=_INTERRUPTED)
    if overlay.target.module not in sys.modules:
        return derived_records.if_absent(record, state.installed) if record.decision is Decision.ARMED else record
    from megacpp_overlays.loader import review

    found = review.review(record, overlay, part.traces, deep=deep)
    if found.decision is Decision.ACTIVE and (why := lost(state, overlay)):
        return replace(found, decision=Decision.CONFLICT, reason=why)
    return found


def lost(state: SessionState, overlay: Overlay) -> str:
    """Return a sentence on a dependency that an active overlay has lost, or an empty text; no probe runs."""
    if not (overlay.needs or overlay.needs_parts) or not state.part(overlay).is_active:
        return ""
    known = (_as_last_decided(state, part) for part in needs.parts(overlay, state.declared.overlays))
    return needs.unmet((record for record in known if record is not None), overlay)


def _as_last_decided(state: SessionState, needed: Overlay) -> Record | None:
    """Return the current or the predicted record of a needed overlay; None if neither is known."""
    part = state.part(needed)
    return reviewed(state, part.record) if part.is_undone or needs.is_known(part.record) else part.expected


def unmet(state: SessionState, overlay: Overlay, tree: SourceTree) -> str:
    """Return a sentence on an unmet dependency of an overlay, which must not be installed then; an empty text if all are met."""
    if not (overlay.needs or overlay.needs_parts):
        return ""
    records = [_now_or_expected(state, part, tree) for part in needs.parts(overlay, state.declared.overlays)]
    if why := needs.unmet(records, overlay):
        return why
    for record in records:
        module = sys.modules.get(record.overlay.target.module)
        is_settled = needs.is_known(record) and record is not state.part(record.overlay).expected
        if is_settled and module is not None and (why := needs.misbehaves(record, module)):
            return why
    return ""


def _now_or_expected(state: SessionState, needed: Overlay, tree: SourceTree) -> Record:
    """Return the current record of a needed overlay, or its prediction from source; see `needs`."""
    part = state.part(needed)
    if needs.is_known(part.record):
        return reviewed(state, part.record)
    part.expected = needs.expected(part.record, state.settings, tree)
    return part.expected


def foreign_code_under(state: SessionState, overlay: Overlay) -> str:
    """Return a sentence on a definition under an active overlay that is third-party code, or an empty text.

    With such code in the place of upstream's, the correction of the overlay may be made twice.
    """
    part = state.part(overlay)
    if not part.is_active or state.lock_of(overlay).is_taken():
        return ""
    held = probing.held_against_its_readings(part.record)
    return held.reason if held is not part.record else ""
