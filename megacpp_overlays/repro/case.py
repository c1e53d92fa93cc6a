"""Case of a reproducer: one measurement, its device and its possible results.

`packs/NN-slug/reproduce.py` declares `CASES`, a tuple of cases. A case calls upstream through its public entry, measures,
and returns its measurement. It knows nothing of the overlay, so the same measurement judges upstream and the fix.
Upstreams are imported inside `run`, because the file is also loaded by processes that run no case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megacpp_overlays import variables
from megacpp_overlays.errors import OverlayError
from megacpp_overlays.model import Target
from megacpp_overlays.repro.judge import Sentinel, meaning

CPU, CUDA = "cpu", "cuda"

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_WORD = re.compile(r"[A-Z]+(_[A-Z]+)*")


class PackError(OverlayError):
    """Raised when a pack is missing, or its reproducer is not valid."""


class Blocked(OverlayError):  # noqa: N818 - the word that is printed
    """Raised by a case that this host cannot run; the text is the reason."""


class TargetAbsent(OverlayError):  # noqa: N818 - the word of the verdict it agrees with
    """Raised by a case when this upstream does not have the subject of the pack; the text names the missing feature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """Measurement of a case."""

    broken: bool
    seen: str
    """One line with numbers: both sides of the comparison, and how far apart they are."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One measurement of one overlay's defect, of one gate's combination, or of one claim about upstream.

    Raises:
        ValueError: a field has a value that is not allowed.
    """

    name: str
    """Lower-case words joined by hyphens, unique in its pack."""
    overlay: str | None
    """Id of the overlay that is off in the first run and on in the second. Once it is retired the case stays as it is
    and runs once, as a regression guard. A case of a gate runs once. None for a claim, which runs once, too."""
    device: str
    """`cpu` or `cuda`. A cuda case is BLOCKED on a host without one."""
    versions: tuple[str, ...]
    """Distributions whose versions belong in the stamp, in addition to the overlay's own target."""
    run: Callable[[], Behaviour]
    """Measures in a fresh process; raises Blocked or TargetAbsent where it cannot."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the child process, such as TRITON_INTERPRET=1."""
    targets: tuple[str, ...] = ()
    """Modules of the overlay's parts that the case is about; empty means every part. The measured behaviour must agree
    with the probes of these parts."""
    crash_is_broken: bool = False
    """Whether a process that dies while it measures shows the defect. Without this a crash is a failure."""
    claim: str = ""
    """Statement about upstream that a case without an overlay checks; `Behaviour.broken` says that it is false."""
    about: tuple[Target, ...] = ()
    """Targets that a claim is about."""
    fix_sentinel: str = Sentinel.FIX_VALIDATED.value
    """Word that is printed where the fix is shown: upper-case words joined by underscores."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"case name {self.name!r} is not lower-case words joined by hyphens")
        if self.device not in {CPU, CUDA}:
            raise ValueError(f"case {self.name}: device {self.device!r} is neither {CPU} nor {CUDA}")
        if ours := [name for name in self.environment if variables.is_ours(name)]:
            raise ValueError(f"case {self.name}: {', '.join(ours)} is set by the runner")
        if not _WORD.fullmatch(self.fix_sentinel):
            raise ValueError(f"case {self.name}: {self.fix_sentinel!r} is not upper-case words joined by underscores")
        if (self.overlay is None) != bool(self.claim and self.about):
            raise ValueError(f"case {self.name}: it has an overlay, or a claim and its targets")
        if meaning(self.fix_sentinel) is not Sentinel.FIX_VALIDATED:
            raise ValueError(f"case {self.name}: {self.fix_sentinel} means something else")

    def word(self, sentinel: Sentinel) -> str:
        """Return the word that this case prints for a sentinel."""
        return self.fix_sentinel if sentinel is Sentinel.FIX_VALIDATED else sentinel.value
