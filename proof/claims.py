"""Parts of a proof: claims, judgements, and the subjects of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

Found = dict[str, Any]
"""The measurements of a subject, as they are kept in JSON."""
Say = Callable[[str], None]


class Outcome(Enum):
    """The outcome of a claim."""

    HOLDS = "HOLDS"
    FAILS = "FAILS"
    UPSTREAM = "UPSTREAM"
    """Something fails, and fails in the same way without overlays."""


@dataclass(frozen=True)
class Verdict:
    """An outcome, and the figure that it rests on."""

    outcome: Outcome
    figure: str

    @classmethod
    def of(cls, figure: str, *, holds: bool) -> Verdict:
        """Return HOLDS or FAILS."""
        return cls(Outcome.HOLDS if holds else Outcome.FAILS, figure)


@dataclass(frozen=True)
class Claim:
    """One sentence, and the function that judges it from the measurements. Judging starts no process and writes no file."""

    id: str
    says: str
    judge: Callable[[Found], Verdict]
    asked: Callable[[Found], bool] = lambda _: True
    """Whether it can be judged from the measurements: not every host makes all of them."""


@dataclass(frozen=True)
class Workplace:
    """The folders and devices that a measurement may use."""

    folder: Path
    """For its files; empty at first."""
    archives: Path
    """Source archives of upstreams, fetched with their hashes checked."""
    quick: bool
    """Whether to do only as much as shows that all of it works."""
    on_gpu: bool = False
    """Whether the Trainer is launched on the first GPU; Megatron's launcher is wherever there is one."""
    checkout: Path | None = None
    """The user's checkout of Megatron-LM, for files that the registry does not ship."""
    ranks: int = 1
    """Processes of the world in which Megatron-LM's own unit tests run."""


@dataclass(frozen=True)
class Subject:
    """Claims that rest on the same measurement."""

    id: str
    title: str
    measure: Callable[[Workplace, Say], Found]
    claims: tuple[Claim, ...]
    takes: str
    """The number of launches, in words: starting one costs most."""
