"""A line of the pre-flight: one check, how it ended, and why."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path


class CheckOutcome(enum.Enum):
    """How one check ended."""

    PASSED = "passed"
    FAILED = "FAILED"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the pre-flight."""

    name: str
    outcome: CheckOutcome
    reason: str
    details: tuple[str, ...] = ()
    """One line each, such as the places where something was found."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in a file, and what is wrong with it."""

    file: str
    line: int
    """From 1."""
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def by_spots(name: str, spots: list[Spot], passed: str, failed: str) -> Check:
    """Return a check that passed when there are no spots."""
    outcome = CheckOutcome.FAILED if spots else CheckOutcome.PASSED
    return Check(name=name, outcome=outcome, reason=failed if spots else passed, details=tuple(map(str, spots)))


def read_text(path: Path) -> str:
    """Return the text of a file; what is no UTF-8 is replaced, so that a check sees all that it can."""
    return path.read_text(encoding="utf-8", errors="replace")
