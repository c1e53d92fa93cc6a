"""Dependencies between overlays, checked against their decisions.

An overlay may leave a model in a state that unrepaired code handles wrongly; it is then right only together with the repair of
that code. So each overlay that it `needs` must be active, or must have nothing to repair. If the target of a needed overlay has
not been imported, its decision is predicted from the source. When that overlay is decided or undone, its dependents are checked
again.
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
    """Yield every part of every overlay that an overlay needs."""
    return (each for each in overlays if overlay.depends_on(each))


def is_known(record: Record) -> bool:
    """Return whether a probe has run for this record."""
    return record.decision is not Decision.ARMED and record.finding is not None


def expected(record: Record, settings: Settings, tree: SourceTree) -> Record:
    """Return the record that an undecided overlay would get, predicted from the source of its target."""
    assumed = decide(record.overlay, settings, known_or_examined(record.overlay, tree, settings))
    if record.decision is Decision.DISABLED:  # switched off, or undone
        return replace(record, finding=assumed.finding)
    return assumed


def unmet(records: Iterable[Record], dependent: Overlay | None = None) -> str:
    """Return a sentence on the first needed overlay that is not in effect; an empty text if all are.

    Args:
        records: the records of the needed overlays.
        dependent: the overlay that needs them; another part of the same overlay is named by its module.
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
    """Return a sentence on the defect that a needed overlay's live target still shows, or an empty text.

    The self-test of an active overlay, or the witness of another one, runs on the target.
    """
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
    except Exception as error:  # noqa: BLE001 - a target that cannot be tested is not known to be right
        return f"it needs {overlay.id}, which cannot be asked: {type(error).__name__}: {error}"
    problem = f"it needs {overlay.id}, which is {record.decision.value} here and does not help: {seen.seen}"
    return problem if seen.broken else ""
