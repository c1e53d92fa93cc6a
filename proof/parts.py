"""Receipts of several runs, each of some subjects, put together as those of one: a GPU may be lent for minutes at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from claims import Found

ALIKE = ("host", "quick")
"""Fields that must be the same in all parts."""
SHARED = ("versions", "inputs")
"""Fields in which the names that two parts share must have the same values."""


class PartsError(ValueError):
    """Raised where parts are not of one proof; the text says which, and why."""


def joined(parts: Sequence[Found], names: Sequence[str]) -> Found:
    """Return the receipts of all parts as those of one run, in the order in which they are given.

    Args:
        parts: receipts.
        names: of their files, for error messages.

    Raises:
        PartsError: two were measured with other things, or both have a subject.
    """
    first, *others = parts
    found: Found = {**first, "measured": {}, "claims": [], "problems": []}
    subjects: dict[str, str] = {}
    checkouts: dict[str, Any] = {}
    for part, name in zip(parts, names, strict=True):
        for key in ALIKE:
            _same(key, first[key], part[key], names[0], name)
        for key in SHARED:
            for each in found[key].keys() & part[key].keys():
                _same(f"{key}, {each}", found[key][each], part[key][each], names[0], name)
            found[key] = {**found[key], **part[key]}
        for subject, measured in part["measured"].items():
            if subject in subjects:
                raise PartsError(f"{subject} is in {subjects[subject]} and in {name}: give one of the two")
            subjects[subject] = name
            if checkout := measured.get("checkout"):
                of, known = checkouts.setdefault("first", (name, checkout))
                _same("checkout", known, checkout, of, name)
        found["measured"] |= part["measured"]
        found["claims"] = [*found["claims"], *part["claims"]]
        found["problems"] = [*found["problems"], *part["problems"]]
    found["date"] = max(part["date"] for part in parts)
    for key in ("seconds", "cpu_seconds"):
        found[key] = sum(part[key] for part in parts)
    return found if others else first


def _same(field: str, one: Any, other: Any, of: str, name: str) -> None:
    if one != other:
        raise PartsError(f"{field}: {one} in {of}, {other} in {name}: these are not parts of one proof")
