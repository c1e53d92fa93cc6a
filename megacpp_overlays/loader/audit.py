"""Audit: all decisions of this process, as a table, as JSON, and as a fingerprint for the comparison of ranks.

This module is imported with the package, so modules that only a report needs are imported inside functions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megacpp_overlays.errors import ActivationError
from megacpp_overlays.frozen import Frozen, replace
from megacpp_overlays.loader.settings import Mode, Settings
from megacpp_overlays.model import UNDECIDED, Decision, Record

if TYPE_CHECKING:
    from megacpp_overlays.loader.rendering import AuditWithCopiesData

SCHEMA = 1
"""Version of the JSON form. It changes when a key changes its meaning."""

_SAID_ONCE = frozenset({Decision.ABSENT, Decision.ARMED, Decision.DISABLED})
"""Decisions that one record states for all parts of an overlay."""


class Audit(Frozen):
    """A snapshot of every decision. Its text lists decisions that need attention first."""

    version: str
    """Version of this package."""
    mode: str
    settings: Settings
    """Settings of the process."""
    records: tuple[Record, ...]
    """Every part of every overlay, in order."""
    hub_copies: tuple[str, ...] = ()
    """Sentences about copies of upstream code from the Hugging Face Hub, which no overlay repairs."""

    @property
    def decisions(self) -> tuple[Record, ...]:
        """The records that state the decision of each overlay; the printed text has these."""
        return deciding_records(self.records)

    @property
    def of_overlays(self) -> tuple[Record, ...]:
        """The records without those of gates, which run no code and may depend on the GPUs of the host."""
        return tuple(record for record in self.records if record.overlay.installs)

    @property
    def conflicts(self) -> tuple[Record, ...]:
        """The decisions that end a strict run: conflict and unproved."""
        return tuple(record for record in self.records if record.decision in UNDECIDED)

    @property
    def fingerprint(self) -> str:
        """Hash of everything that `verify_ranks` compares: two ranks with the same fingerprint run the same code.

        The hash covers the files of this package, every setting that changes the code that runs, the versions of Python, torch and
        triton, and for every overlay its decision, the source, and third-party code around its seams. Gates are left out.
        """
        return _fingerprint(self)

    def as_dict(self) -> AuditWithCopiesData:
        """Return plain data with stable keys, fit for a checkpoint or an experiment tracker."""
        from megacpp_overlays.loader.rendering import as_dict

        data: AuditWithCopiesData = {
            "schema": SCHEMA,
            "package": "megacpp_overlays",
            "version": self.version,
            "mode": self.mode,
            "fingerprint": self.fingerprint,
            "decisions": [as_dict(record) for record in self.decisions],
        }
        if self.hub_copies:
            data["hub_copies"] = list(self.hub_copies)
        return data

    def to_json(self) -> str:
        """Return `as_dict` as indented JSON."""
        import json

        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        """Return the text for a terminal, with decisions that need attention first."""
        from megacpp_overlays.loader import overview

        lines = overview.short(self.version, self.mode, self.fingerprint, self.decisions, self.hub_copies)
        return "\n".join(line.text for line in lines)

    def raise_if_strict(self) -> None:
        """Raise for every conflict where the mode is `strict`.

        Raises:
            ActivationError: the mode is `strict`, and an overlay ended in conflict.
        """
        if self.mode == Mode.STRICT.value:
            raise_for(self.conflicts)


@functools.lru_cache(maxsize=1)
def _fingerprint(audit: Audit) -> str:
    from megacpp_overlays.loader import statement
    from megacpp_overlays.source.trees import InstalledTree

    return statement.digest(statement.of(audit, InstalledTree()))


def deciding_records(records: Sequence[Record]) -> tuple[Record, ...]:
    """Return the records that state the decision of each overlay, without parts that add nothing to it.

    An overlay has a part for each module in which upstream ever had the defect, and most trees have only one of them.
    So a part that is absent or retired is left out where another part has another decision: an overlay is retired when no
    part of it has work left. Of several parts that wait, are off or are absent, only the first is kept. Records of installed parts and of
    failures are always kept.
    """
    most: dict[str, int] = {}
    for record in records:
        most[record.overlay.id] = max(_weight(record), most.get(record.overlay.id, 0))
    kept: list[Record] = []
    said: set[tuple[str, Decision]] = set()
    for record in records:
        overlay, decision = record.overlay.id, record.decision
        alike = decision in _SAID_ONCE and (overlay, decision) in said
        if _weight(record) == most[overlay] and not alike:
            kept.append(_waiting_for_all(record, records) if decision is Decision.ARMED else record)
            said.add((overlay, decision))
    return tuple(kept)


def _waiting_for_all(record: Record, records: Sequence[Record]) -> Record:
    """Return the record of a part that waits, with the targets of the other parts that wait."""
    waiting = [r for r in records if r.overlay.id == record.overlay.id and r.decision is Decision.ARMED]
    others = [f" or {other.overlay.target.module}" for other in waiting if other is not record]
    return replace(record, reason="".join([record.reason, *others]))


def _weight(record: Record) -> int:
    return {Decision.ABSENT: 0, Decision.RETIRED: 1}.get(record.decision, 2)


def raise_for(conflicts: Sequence[Record]) -> None:
    """Raise if there is any conflict.

    Raises:
        ActivationError: the message names each overlay, its target, the evidence and the remedy.
    """
    if conflicts:
        from megacpp_overlays.terminal_text import one_line

        raise ActivationError(
            "\n".join(
                f"{record.overlay.id} could not be decided on {record.overlay.target} "
                f"({record.version or 'unknown version'}): {one_line(record.reason)}. "
                f"Switch it off with {record.overlay.variable}=off, or leave strict mode."
                for record in conflicts
            )
        )
