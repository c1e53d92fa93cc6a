"""Requirements of a job on the decisions of an audit, and the check of an audit against them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megacpp_overlays.errors import RequirementError
from megacpp_overlays.loader.audit import Audit
from megacpp_overlays.model import Decision, Record
from megacpp_overlays.near_names import suggestion

_ALL_IDS = "`megacpp-overlays audit`"
_DECISIONS = tuple(each.value for each in Decision)
_CHANGES_NOTHING = {Decision.ABSENT, Decision.ARMED, Decision.DISABLED, Decision.RETIRED}
"""Decisions that are accepted for an overlay which the kept audit does not have: upstream runs unchanged, and no action is needed."""


class Requirement(NamedTuple):
    """The decisions that a job accepts for an overlay or a gate, in every part of it that counts."""

    id: str
    decisions: tuple[str, ...]


class Unmet(NamedTuple):
    """A decision that does not meet a requirement."""

    id: str
    wanted: str
    found: str
    reason: str
    """Reason of the decision in the audit; empty if there is no such decision."""

    def __str__(self) -> str:
        """Return the unmet requirement as one line."""
        because = f": {self.reason}" if self.reason else ""
        return f"{self.id} has to be {self.wanted} and is {self.found}{because}"


def parse(text: str, known: Collection[str]) -> Requirement:
    """Return the requirement of `ID=DECISION` or `ID=DECISION,DECISION`.

    Args:
        text: the requirement as the user wrote it.
        known: ids of all overlays and gates.

    Raises:
        RequirementError: the text has another form, or there is no such overlay or decision; the message has the nearest one.
    """
    name, sign, given = text.partition("=")
    wanted = tuple(given.split(","))
    if not sign or not given:
        raise RequirementError(f"{text}: ID=DECISION is wanted, such as {next(iter(known))}=active")
    if name not in known:
        raise RequirementError(f"{text}: there is no overlay {name}; {suggestion(name, sorted(known), where=_ALL_IDS)}")
    if unknown := [each for each in wanted if each not in _DECISIONS]:
        raise RequirementError(f"{text}: there is no decision {unknown[0]!r}; {suggestion(unknown[0], _DECISIONS)}")
    return Requirement(name, wanted)


def unmet(requirements: Sequence[Requirement], audit: Audit) -> tuple[Unmet, ...]:
    """Return the requirements that an audit does not meet, in their order."""
    return tuple(_unmet(requirements, audit))


def _unmet(requirements: Sequence[Requirement], audit: Audit) -> Iterator[Unmet]:
    for wanted in requirements:
        for record in audit.decisions:
            if record.overlay.id == wanted.id and record.decision.value not in wanted.decisions:
                yield Unmet(wanted.id, " or ".join(wanted.decisions), record.decision.value, record.reason)


def unexpected(kept: Mapping[str, Any], audit: Audit) -> tuple[Unmet, ...]:
    """Return the overlays and gates whose decisions differ from those in a kept audit.

    An overlay that the kept audit does not have may be new in this package. It is unexpected only if its decision changes the
    process or needs an action.

    Args:
        kept: `audit().as_dict()` of another run, as `audit_diff.read` returns it.
        audit: the audit to compare with it.
    """
    return tuple(_unexpected(kept, audit))


def _unexpected(kept: Mapping[str, Any], audit: Audit) -> Iterator[Unmet]:
    expected: dict[str, set[str]] = {}
    for each in kept["decisions"]:
        expected.setdefault(each["id"], set()).add(each["decision"])
    found: dict[str, list[Record]] = {}
    for record in audit.decisions:
        found.setdefault(record.overlay.id, []).append(record)
    for name in dict.fromkeys([*expected, *found]):
        wanted = " and ".join(sorted(expected.get(name, ())))
        records = found.get(name, [])
        decisions = {each.decision.value for each in records}
        if name not in expected:
            others = [each for each in records if each.decision not in _CHANGES_NOTHING]
            yield from (Unmet(name, "in the kept audit", each.decision.value, each.reason) for each in others[:1])
        elif decisions != expected[name]:
            reason = next((each.reason for each in records if each.decision.value not in expected[name]), "")
            yield Unmet(name, wanted, " and ".join(sorted(decisions)) or "not in this package", reason)
