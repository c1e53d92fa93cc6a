"""State of one part of an overlay, or of a gate, in this process."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from megacpp_overlays.model import Decision, Record

if TYPE_CHECKING:
    from megacpp_overlays.loader.traces import Traces


class PartChange(enum.Enum):
    """Why a part is being changed, or was when an exception ended it."""

    SETTLED = "put in or taken out"
    ARMED_AGAIN = "settled anew after `undo`"


class PartState:
    """Record of a part, the places where it was put, and why it has to be settled again.

    Each attribute is assigned as a whole, so an interrupt leaves the old value or the new one. `change` is set before the
    first effect and cleared after the last.
    """

    __slots__ = ("change", "expected", "is_refused", "is_short_of_memory", "is_undone", "record", "traces")

    def __init__(self, record: Record) -> None:
        self.record = record
        self.expected: Record | None = None
        """What another overlay expected this one to become, before its target was imported."""
        self.traces: Traces | None = None
        """Places; None before the first."""
        self.change: PartChange | None = None
        """None where no change was begun, or it was finished."""
        self.is_undone = False
        """Whether `undo` took it out; it stays out until `arm` is called."""
        self.is_refused = False
        """Whether it is out because of code of another library, or of an overlay that it needs; `arm` tries again."""
        self.is_short_of_memory = False
        """Whether a MemoryError ended the last change; `arm` tries again."""

    @property
    def is_active(self) -> bool:
        """Whether the record says that its seams are in."""
        return self.record.decision is Decision.ACTIVE

    @property
    def is_settled_by_arming(self) -> bool:
        """Whether `arm` has to settle it although its target is as it was."""
        return self.change is not None or self.is_short_of_memory or self.is_refused

    @property
    def is_placed(self) -> bool:
        """Whether a place is known into which it was put and from which it was not taken."""
        return self.traces is not None and any(True for _ in self.traces.places())

    @property
    def has_seams(self) -> bool:
        """Whether a function that it put somewhere still exists."""
        return self.traces is not None and self.traces.has_seams()

    def begin(self, change: PartChange = PartChange.SETTLED) -> None:
        """Note that a change begins. One that was begun before and not finished keeps its reason."""
        if self.change is None:
            self.change = change

    def written_traces(self) -> Traces:
        """Return the places, to note more."""
        from megacpp_overlays.loader.traces import Traces

        if self.traces is None:
            self.traces = Traces()
        return self.traces
