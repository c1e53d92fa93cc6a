"""State of one part of an overlay, or of a gate, in this process."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from megacpp_overlays.model import Decision, Record

if TYPE_CHECKING:
    from megacpp_overlays.loader.traces import Traces


class PartChange(enum.Enum):
    """The kind of a change of a part that is in progress, or that an exception ended."""

    SETTLED = "put in or taken out"
    ARMED_AGAIN = "settled anew after `undo`"


class PartState:
    """Record of a part, the places where it was installed, and flags for another decision at the next arming.

    Each attribute is assigned as a whole, so an interrupt leaves the old value or the new one. `change` is set before the
    first effect and cleared after the last.
    """

    __slots__ = ("change", "expected", "is_refused", "is_short_of_memory", "is_undone", "record", "traces")

    def __init__(self, record: Record) -> None:
        self.record = record
        self.expected: Record | None = None
        """The record that was predicted for another overlay that needs this one, before the target was imported."""
        self.traces: Traces | None = None
        """Places of its seams; None before the first seam."""
        self.change: PartChange | None = None
        """The unfinished change; None if there is none."""
        self.is_undone = False
        """Whether `undo` took it out; it stays out until `arm` is called."""
        self.is_refused = False
        """Whether it is out because of third-party code, or of an overlay that it needs; `arm` tries again."""
        self.is_short_of_memory = False
        """Whether a MemoryError ended the last change; `arm` tries again."""

    @property
    def is_active(self) -> bool:
        """Whether the record says that its seams are installed."""
        return self.record.decision is Decision.ACTIVE

    @property
    def is_settled_by_arming(self) -> bool:
        """Whether `arm` has to decide it again although its target is unchanged."""
        return self.change is not None or self.is_short_of_memory or self.is_refused

    @property
    def is_placed(self) -> bool:
        """Whether a place is known where it was installed and not taken out."""
        return self.traces is not None and any(True for _ in self.traces.places())

    @property
    def has_seams(self) -> bool:
        """Whether a function that it installed still exists."""
        return self.traces is not None and self.traces.has_seams()

    def begin(self, change: PartChange = PartChange.SETTLED) -> None:
        """Record the start of a change. An unfinished earlier change keeps its kind."""
        if self.change is None:
            self.change = change

    def written_traces(self) -> Traces:
        """Return the traces, for further places; the first call creates them."""
        from megacpp_overlays.loader.traces import Traces

        if self.traces is None:
            self.traces = Traces()
        return self.traces
