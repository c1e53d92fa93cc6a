"""Parts of a proof: claims, judgements, and the subjects of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

Found = dict[str, Any]
"""What was measured of a subject, as it is kept in JSON."""
Say = Callable[[str], None]


class Outcome(Enum):
    """What is said of a claim."""

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
    """One sentence, and the function that judges it from what was measured. Judging starts nothing and writes nothing."""

    id: str
    says: str
    judge: Callable[[Found], Verdict]
    asked: Callable[[Found], bool] = lambda _: True
    """Whether it can be judged from what was measured: not everything is, on every host."""


@dataclass(frozen=True)
class Workplace:
    """What a measurement may use."""

    folder: Path
    """For its files; empty at first."""
    archives: Path
    """Source archives of upstreams, fetched with their hashes checked."""
    quick: bool
    """Whether to do only as much as shows that all of it works."""
    on_gpu: bool = False
    """Whether the Trainer is launched on the first GPU; Megatron's launcher is wherever there is one."""
    checkout: Path | None = None
    """Megatron-LM as the user has it, for what the registry does not ship."""
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
    """How many launches it is, in words: what costs most is to begin one."""
