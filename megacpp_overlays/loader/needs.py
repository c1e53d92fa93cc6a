"""Dependencies between overlays, checked against their decisions.

An overlay that leaves a model in a state which unrepaired code handles wrongly is only right together with the repair of
that code. So each overlay that it `needs` must be in, or must have nothing to repair. One whose target has not been
imported is asked what it would be; when it is settled, or undone, what depends on it is looked at again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import ModuleType

from megacpp_overlays.frozen import replace
from megacpp_overlays.loader.decide import decide
from megacpp_overlays.loader.decisions import TRAITS
from megacpp_overlays.loader.probing import known_or_examined
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.model import Decision, Erratum, Overlay, Record, Verdict
from megacpp_overlays.source.trees import SourceTree

_NOTHING_TO_REPAIR = {Verdict.FIXED, Verdict.ABSENT}


def parts(overlay: Overlay, overlays: Iterable[Overlay]) -> Iterator[Overlay]:
    """Yield every part of every overlay that one needs."""
    return (each for each in overlays if overlay.depends_on(each))


def is_known(record: Record) -> bool:
    """Return whether a probe was asked for this record."""
    return record.decision is not Decision.ARMED and record.finding is not None


def expected(record: Record, settings: Settings, tree: SourceTree) -> Record:
    """Return what an overlay that nobody settled would be, as far as its source tells."""
    assumed = decide(record.overlay, settings, known_or_examined(record.overlay, tree, settings))
    if record.decision is Decision.DISABLED:  # switched off, or undone
        return replace(record, finding=assumed.finding)
    return assumed


def unmet(records: Iterable[Record], dependent: Overlay | None = None) -> str:
    """Return which of the records of what is needed does not hold, in words; an empty text if all do.

    Args:
        records: of what is needed.
        dependent: what needs it; another part of the same overlay is named by its module.
    """
    for record in records:
        nothing = record.finding is not None and record.finding.verdict in _NOTHING_TO_REPAIR
        if not TRAITS[record.decision].meets_a_need and not (record.decision is Decision.DISABLED and nothing):
            return (
                f"it needs {_name(record.overlay, dependent)}, which is {record.decision.value} here: {record.reason}"
            )
    return ""


def _name(needed: Erratum, dependent: Overlay | None) -> str:
    is_part = dependent is not None and dependent.id == needed.id
    return f"its part on {needed.target.module}" if is_part else needed.id


def misbehaves(record: Record, module: ModuleType) -> str:
    """Return what the live target of an overlay that holds does wrong all the same, in words."""
    overlay = record.overlay
    if not isinstance(overlay, Overlay) or record.decision is Decision.ABSENT:
        return ""
    ask = overlay.self_test if record.decision is Decision.ACTIVE else overlay.witness
    if ask is None:
        return ""
    from megacpp_overlays.runtime import calls  # noqa: PLC0415 - only where something is needed

    try:
        with calls.not_counted():
            seen = ask(module)
    except Exception as error:  # noqa: BLE001 - what cannot be asked is not known to be right
        return f"it needs {overlay.id}, which cannot be asked: {type(error).__name__}: {error}"
    what = f"it needs {overlay.id}, which is {record.decision.value} here and does not help: {seen.seen}"
    return what if seen.broken else ""
