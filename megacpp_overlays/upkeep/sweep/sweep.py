"""A look at every linked upstream thread: what happened since the last one, and who may retire because of it.

Landing is no proof: a merge may repair another shape, or half of one. It says where to look; the probe decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import TYPE_CHECKING

from megacpp_overlays.upkeep.sweep.host_errors import HostError, UnreachableError
from megacpp_overlays.upkeep.sweep.lookup import Lookup, ReleaseSearch, ask
from megacpp_overlays.upkeep.sweep.patience import one_by_one
from megacpp_overlays.upkeep.sweep.threads import API, CLOSED, DRAFT, MERGED, OPEN, Answer, Key
from megacpp_overlays.upkeep.sweep.waiting import ThreadMention, WatchedThread

if TYPE_CHECKING:
    from megacpp_overlays.upkeep.sweep.github import Client


def landed(before: Answer | None, after: Answer) -> bool:
    """Return whether a repair may have arrived: merged, in a first release, or an issue closed as completed."""
    was = before.state if before else None
    merged = after.state == MERGED and was != MERGED
    released = after.released_in is not None and (before is None or before.released_in != after.released_in)
    completed = after.state == CLOSED and was != CLOSED and after.reason == "completed"
    return merged or released or completed


def news(before: Answer | None, after: Answer) -> str | None:
    """Say in words what happened to a thread between two answers; None where nothing did."""
    happened = []
    was = before.state if before else None
    if after.state != was:
        reopened = was in {CLOSED, MERGED} and after.state in {OPEN, DRAFT}
        words = {(DRAFT, OPEN): "ready for review", (OPEN, DRAFT): "a draft again"}
        plain = "reopened" if reopened else words.get((str(was), str(after.state)), after.sentence())
        happened.append(f"{plain} (was {was or 'unknown'})")
    else:
        old = (before.released_in, before.prerelease) if before else (None, None)
        if (after.released_in, after.prerelease) != old and (after.released_in or after.prerelease):
            happened.append(f"released: {after.sentence()}")
        if before and before.base and after.base != before.base:
            happened.append(f"now for {after.base}")
    if after.moved_to and (before is None or before.moved_to != after.moved_to):
        happened.append(f"moved to {after.moved_to}")
    return "; ".join(happened) or None


def as_of(answer: Answer, day: date) -> Answer | None:
    """Return what would have been answered just before a day; None where the thread was not there yet."""
    if answer.created is not None and answer.created >= day:
        return None
    ended = answer.merged or answer.closed
    if ended is not None and ended >= day:
        open_again = replace(answer, state=OPEN, reason=None, closed=None, merged=None, merge_commit=None)
        return replace(open_again, released_in=None, released=None, prerelease=None)
    if answer.released is not None and answer.released >= day:
        return replace(answer, released_in=None, released=None)
    return answer


@dataclass(frozen=True, slots=True, eq=False)
class SweptThread:
    """One thread, before and after the sweep."""

    waiting: WatchedThread
    before: Answer | None
    """What was known before, or on the day that was asked for."""
    now: Answer | None
    """What is known now; None where nobody has ever looked."""
    failure: str | None
    """Why the host gave no answer this time."""

    @property
    def news(self) -> str | None:
        """What happened since, in words."""
        return news(self.before, self.now) if self.now else None

    @property
    def landed(self) -> bool:
        """Whether a repair may have arrived since."""
        return self.now is not None and landed(self.before, self.now)

    def contradictions(self) -> list[tuple[ThreadMention, str]]:
        """Return every place that tells of the thread, and what is not as declared; none where nothing is."""
        wrong = self.now.contradiction() if self.now else None
        return [(each, wrong) for each in self.waiting.declared] if wrong else []


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """What one sweep saw."""

    threads: tuple[SweptThread, ...]
    day: date
    online: bool
    """Whether the host answered at all."""
    stopped: str | None
    """Why it ended before the last thread."""

    @property
    def clean(self) -> bool:
        """Whether there is nothing to do: nothing landed, nothing is declared wrongly, every thread has an answer."""
        return not self.stopped and not any(
            each.landed or each.contradictions() or each.failure or each.now is None for each in self.threads
        )

    def older_than(self, days: int) -> list[WatchedThread]:
        """Return the threads of which nobody has asked for longer than this, the oldest first; what is final is never old."""
        ages = [(each.now.checked, each.waiting) for each in self.threads if each.now and not each.now.final]
        return [each for checked, each in sorted(ages, key=lambda pair: pair[0]) if (self.day - checked).days > days]

    def answers(self, saved: Mapping[Key, Answer]) -> list[Answer]:
        """Return what is to be saved: the new answers, and the old ones of all other threads."""
        return list({**saved, **{each.waiting.key: each.now for each in self.threads if each.now}}.values())


def from_saved(waiting: Sequence[WatchedThread], saved: Mapping[Key, Answer], today: date, since: date | None) -> Sweep:
    """Return a sweep that asks nobody.

    Args:
        waiting: the threads.
        saved: what is known of them.
        today: the day of the sweep, UTC.
        since: tell what happened on this day and later; None is since the saved answers, so nothing.
    """
    return _swept(waiting, saved, {}, {}, today, since, online=False, stopped=None)


def from_host(
    waiting: Sequence[WatchedThread],
    saved: Mapping[Key, Answer],
    client: Client,
    today: date,
    since: date | None = None,
) -> Sweep:
    """Ask the host about every thread that can still change, one after the other.

    Releases that an earlier sweep did not get to come first, then states, then the releases of what those say is
    merged. The thread that was not asked about for longest is the first of its kind, and one that the host answered
    today is not asked for again. So where the budget of requests ends early, the next sweep goes on from there if the
    answers were saved.

    Raises:
        RefusedError: the host does not take the token.
        UnreachableError: there is no way to the host, and nothing was learned.
    """
    found: dict[Key, Answer] = {}
    failures: dict[Key, str] = {}
    releases = ReleaseSearch(client)
    learned = {each.key: Lookup.of(saved[each.key]) for each in waiting if _owed(saved.get(each.key))}

    def release(key: Key) -> None:
        found[key] = releases.find(learned[key], today)

    def state(key: Key) -> None:
        learned[key] = ask(client, *key, found.get(key) or saved.get(key), today)
        found[key] = learned[key].answer

    def unreleased() -> list[Key]:
        now = [found.get(key, asked.answer) for key, asked in learned.items()]
        left = [each for each in now if each.released_in is None and each.state == MERGED]
        left = [each for each in left if each.releases_checked != today]
        return [each.key for each in sorted(left, key=lambda each: each.releases_checked or date.min)]

    states = [each.key for each in waiting if not _settled(saved.get(each.key), today)]
    states.sort(key=lambda key: _last_asked(saved.get(key)))
    stopped = one_by_one(unreleased(), release, failures)
    stopped = one_by_one(states, state, failures, stopped) or stopped
    stopped = one_by_one(unreleased(), release, failures, stopped) or stopped
    if isinstance(stopped, UnreachableError) and not found:
        raise stopped
    return _swept(waiting, saved, found, failures, today, since, online=True, stopped=stopped)


def _settled(known: Answer | None, today: date) -> bool:
    return known is not None and (known.final or (known.source == API and known.checked == today))


def _owed(known: Answer | None) -> bool:
    """Return whether the host said that a thread is merged, and its releases were not looked at since."""
    if known is None or known.source != API or known.state != MERGED or known.final:
        return False
    return known.releases_checked is None or known.releases_checked < known.checked


def _last_asked(known: Answer | None) -> tuple[bool, date]:
    return (known.source == API, known.checked) if known else (False, date.min)


def _swept(
    waiting: Sequence[WatchedThread],
    saved: Mapping[Key, Answer],
    found: Mapping[Key, Answer],
    failures: Mapping[Key, str],
    today: date,
    since: date | None,
    *,
    online: bool,
    stopped: HostError | None,
) -> Sweep:
    threads = []
    for each in waiting:
        before = saved.get(each.key)
        now = found.get(each.key, before)
        if since is not None and now is not None:
            before = as_of(now, since)
        threads.append(SweptThread(each, before, now, failures.get(each.key)))
    return Sweep(tuple(threads), today, online=online, stopped=str(stopped) if stopped else None)
