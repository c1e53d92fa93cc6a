"""Traits of the decisions: one table of their treatment in logs, reports and dependencies."""

from __future__ import annotations

from typing import NamedTuple

from megacpp_overlays.model import Decision


class DecisionTraits(NamedTuple):
    """Treatment of one decision in logs, reports and dependencies."""

    place_in_counts: int
    """Position in the line with the counts."""
    word: str = ""
    """Word for it in the line with the counts; empty for the value of the decision."""
    is_always_counted: bool = False
    """Whether the line with the counts names it also at 0."""
    is_warned: bool = False
    """Whether it is logged as a warning."""
    needs_attention: bool = False
    """Whether the user must look at each record with it. Unproved records need none: one command proves all of a release."""
    can_be_switched_off: bool = False
    """Whether a message names the variable that switches the overlay off."""
    can_be_deleted: bool = False
    """Whether a message names the condition for deleting the overlay."""
    meets_a_need: bool = False
    """Whether another overlay may depend on an overlay with it."""


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
"""Traits by decision, in order of precedence: the first decision among the parts of an overlay counts for the overlay."""

FIRST = tuple(TRAITS)
"""Decisions in that order, the worst first."""
WARNED = tuple(each for each in FIRST if TRAITS[each].is_warned)
"""Decisions that are logged as warnings, the worst first."""
ATTENTION = tuple(each for each in FIRST if TRAITS[each].needs_attention)
"""Decisions whose records the user must look at one by one, the worst first."""
COUNTED = tuple(sorted(FIRST, key=lambda each: TRAITS[each].place_in_counts))
"""Decisions in the order of the line with the counts."""
