"""A sweep over every linked upstream thread: the news since the last sweep, and the overlays that may retire because of it.

Landing is no proof, because a merge may repair another shape, or half of one. It shows where to look; the probe decides.
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
    """Return whether a repair may have landed: a pull request merged or first released, or an issue closed as completed."""
    was = before.state if before else None
    merged = after.state == MERGED and was != MERGED
    released = after.released_in is not None and (before is None or before.released_in != after.released_in)
    completed = after.state == CLOSED and was != CLOSED and after.reason == "completed"
    return merged or released or completed


def news(before: Answer | None, after: Answer) -> str | None:
    """Return the changes of a thread between two answers, in words; None where nothing changed."""
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
    """Return the answer that was right just before a day; None where the thread did not exist yet."""
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
    """The saved answer, or the answer as of the requested day."""
    now: Answer | None
    """The newest answer; None where the thread was never looked up."""
    failure: str | None
    """The reason why the host gave no answer this time."""

    @property
    def news(self) -> str | None:
        """The changes since, in words."""
        return news(self.before, self.now) if self.now else None

    @property
    def landed(self) -> bool:
        """Whether a repair may have landed since."""
        return self.now is not None and landed(self.before, self.now)

    def contradictions(self) -> list[tuple[ThreadMention, str]]:
        """Return every declaration of the thread with its contradiction to the host's answer; empty without a contradiction."""
        wrong = self.now.contradiction() if self.now else None
        return [(each, wrong) for each in self.waiting.declared] if wrong else []


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """The result of one sweep."""

    threads: tuple[SweptThread, ...]
    day: date
    online: bool
    """Whether the host was asked."""
    stopped: str | None
    """The reason why the sweep ended before the last thread."""

    @property
    def clean(self) -> bool:
        """Whether there is nothing to do: no thread landed, no declaration is wrong, every thread has an answer."""
        return not self.stopped and not any(
            each.landed or each.contradictions() or each.failure or each.now is None for each in self.threads
        )

    def older_than(self, days: int) -> list[WatchedThread]:
        """Return the threads whose answers are older than this many days, oldest first, without threads in a final state."""
        ages = [(each.now.checked, each.waiting) for each in self.threads if each.now and not each.now.final]
        return [each for checked, each in sorted(ages, key=lambda pair: pair[0]) if (self.day - checked).days > days]

    def answers(self, saved: Mapping[Key, Answer]) -> list[Answer]:
        """Return the answers to save: the new ones, and the saved ones of all other threads."""
        return list({**saved, **{each.waiting.key: each.now for each in self.threads if each.now}}.values())


def from_saved(waiting: Sequence[WatchedThread], saved: Mapping[Key, Answer], today: date, since: date | None) -> Sweep:
    """Return a sweep over saved answers, without a request to the host.

    Args:
        waiting: the threads.
        saved: the saved answers.
        today: the day of the sweep, UTC.
        since: report the changes on this day and later; None reports changes since the saved answers, which are none.
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

    Releases that an earlier sweep did not reach come first, then states, then the releases of newly merged threads.
    Within each group the thread with the oldest answer comes first. A thread that the host answered today is not asked
    for again. So if the budget of requests ends early and the answers are saved, the next sweep continues from there.

    Raises:
        TokenRefusedError: the host does not accept the token.
        UnreachableError: the host cannot be reached, and no thread got an answer.
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
    """Return whether a thread is merged by the host's answer, and its releases were not searched since."""
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
