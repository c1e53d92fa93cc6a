"""Answers about threads for tests, and how hypothesis makes them."""

from __future__ import annotations

from datetime import date
from typing import Any

from hypothesis import strategies as st

from megacpp_overlays.upkeep.sweep.threads import Answer

DAY = date(2026, 8, 1)


def answer(**changes: Any) -> Answer:
    """Return an open pull request, seen by the API, with changes."""
    fields: dict[str, Any] = {
        "repository": "o/r",
        "number": 1,
        "kind": "pull request",
        "state": "open",
        "reason": None,
        "created": date(2026, 3, 1),
        "closed": None,
        "merged": None,
        "merge_commit": None,
        "base": "main",
        "released_in": None,
        "released": None,
        "prerelease": None,
        "releases_checked": None,
        "moved_to": None,
        "checked": DAY,
        "source": "api",
        "declared": None,
    }
    return Answer(**{**fields, **changes})


def merged(day: date = date(2026, 7, 30), **changes: Any) -> Answer:
    """Return a pull request that was merged and whose releases were searched."""
    fields: dict[str, Any] = {
        "state": "merged",
        "closed": day,
        "merged": day,
        "merge_commit": "a" * 40,
        "releases_checked": DAY,
    }
    return answer(**{**fields, **changes})


_DAYS = st.dates(date(2024, 1, 1), date(2027, 1, 1))
_MAYBE_DAY = st.none() | _DAYS
_NAME = st.text("aZ0_.-", min_size=1, max_size=4)
_TEXT = st.none() | st.text("main/v1.0-_", min_size=1, max_size=6)

answers = st.builds(
    Answer,
    repository=st.builds("{}/{}".format, _NAME, _NAME),
    number=st.integers(1, 99999),
    kind=st.sampled_from([None, "issue", "pull request"]),
    state=st.sampled_from([None, "open", "draft", "closed", "merged"]),
    reason=st.sampled_from([None, "completed", "not_planned"]),
    created=_MAYBE_DAY,
    closed=_MAYBE_DAY,
    merged=_MAYBE_DAY,
    merge_commit=st.none() | st.integers(0, 2**160 - 1).map("{:040x}".format),
    base=_TEXT,
    released_in=_TEXT,
    released=_MAYBE_DAY,
    prerelease=_TEXT,
    releases_checked=_MAYBE_DAY,
    moved_to=st.none() | st.builds("{}/{}#{}".format, _NAME, _NAME, st.integers(1, 99)),
    checked=_DAYS,
    source=st.sampled_from(["api", "stored copy"]),
    declared=st.sampled_from([None, "open", "draft", "closed", "merged", "released"]),
)
