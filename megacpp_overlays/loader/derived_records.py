"""Records derived from another record: in conflict, absent, with versions; and the transitions that a record allows."""

from __future__ import annotations

from megacpp_overlays.errors import OverlayError
from megacpp_overlays.frozen import replace
from megacpp_overlays.model import Decision, Evidence, Finding, Record, Verdict
from megacpp_overlays.source.trees import SourceTree


def conflict(record: Record, error: Exception) -> Record:
    """Return the conflict that an error caused; the reason has the class of the error unless it is of this package."""
    own = type(error).__module__.startswith("megacpp_overlays.")
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - third-party exception whose __str__ raises
        text = "no text"
    reason = text if own else f"{type(error).__name__}: {text}"
    return replace(record, decision=Decision.CONFLICT, reason=reason)


def if_absent(record: Record, tree: SourceTree) -> Record:
    """Return the record of an overlay that waits for its target: ABSENT if the target is missing, CONFLICT if it is unreadable."""
    from megacpp_overlays.source import distributions  # noqa: PLC0415 - 28 ms that arming need not spend

    target = record.overlay.target
    try:
        if tree.module(target.module) is not None:
            return record
    except OverlayError as error:  # the target exists
        seen = f"{target.module} cannot be read: {error}"
        unknown = Finding(verdict=Verdict.UNRECOGNISED, shape=None, evidence=(Evidence(seen=seen),))
        return replace(record, decision=Decision.CONFLICT, reason=seen, finding=unknown)
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


def with_versions(record: Record) -> Record:
    """Return the record of a gate with its versions, which a gate without a warning does not look up when it is decided."""
    if record.version or record.overlay.installs or record.finding is None:
        return record
    from megacpp_overlays.loader import probing  # noqa: PLC0415 - no launch needs it

    return replace(record, version=probing.versions(record.overlay))


def may_be_answered_now(record: Record) -> bool:
    """Return whether another run of a gate's probe may give another result: its target was absent, or looks repaired."""
    return record.decision is Decision.ABSENT or (record.finding is not None and record.finding.looks_repaired)


def ends_when_undone(record: Record, *, was_in: bool) -> bool:
    """Return whether undoing an overlay ends its decision; a conflict over unrecognised source remains."""
    if record.decision is Decision.CONFLICT:
        return was_in
    return record.decision in {Decision.ACTIVE, Decision.ARMED}
