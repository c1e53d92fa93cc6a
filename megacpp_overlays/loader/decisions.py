"""Decisions as data: one table of how a log, a report and a dependency treat each."""

from __future__ import annotations

from typing import NamedTuple

from megacpp_overlays.model import Decision


class DecisionTraits(NamedTuple):
    """Treatment of one decision in logs, reports and dependencies."""

    place_in_counts: int
    """In a line that counts."""
    word: str = ""
    """In a line that counts; empty where it is that of the decision."""
    is_always_counted: bool = False
    """Whether a line that counts names it with 0, too."""
    is_warned: bool = False
    """Whether a run is warned of it."""
    needs_attention: bool = False
    """Whether a person must look at each record with it. Unproved records do not: one command proves all of a release."""
    can_be_switched_off: bool = False
    """Whether its reader may want the variable that ends it."""
    can_be_deleted: bool = False
    """Whether its reader may ask how long this goes on."""
    meets_a_need: bool = False
    """Whether another overlay may rest on it."""


TRAITS = {
    Decision.CONFLICT: DecisionTraits(
        place_in_counts=2,
        is_always_counted=True,
        is_warned=True,
        needs_attention=True,
        can_be_switched_off=True,
        can_be_deleted=True,
    ),
    Decision.UNPROVED: DecisionTraits(place_in_counts=3, is_warned=True, can_be_switched_off=True, can_be_deleted=True),
    Decision.GATED: DecisionTraits(
        place_in_counts=4, is_warned=True, needs_attention=True, can_be_switched_off=True, can_be_deleted=True
    ),
    Decision.ACTIVE: DecisionTraits(
        place_in_counts=0, is_always_counted=True, can_be_switched_off=True, can_be_deleted=True, meets_a_need=True
    ),
    Decision.ARMED: DecisionTraits(place_in_counts=5),
    Decision.DISABLED: DecisionTraits(place_in_counts=7, word="off"),
    Decision.RETIRED: DecisionTraits(place_in_counts=1, is_always_counted=True, can_be_deleted=True, meets_a_need=True),
    Decision.ABSENT: DecisionTraits(place_in_counts=6, meets_a_need=True),
}
"""In the order of which one an overlay is counted under whose parts were decided differently."""

FIRST = tuple(TRAITS)
"""Decisions in that order: the worst first."""
WARNED = tuple(each for each in FIRST if TRAITS[each].is_warned)
"""Decisions that a run is warned of, the worst first."""
ATTENTION = tuple(each for each in FIRST if TRAITS[each].needs_attention)
"""Decisions whose records a person must look at one by one, the worst first."""
COUNTED = tuple(sorted(FIRST, key=lambda each: TRAITS[each].place_in_counts))
"""Decisions in the order of a line that counts."""
