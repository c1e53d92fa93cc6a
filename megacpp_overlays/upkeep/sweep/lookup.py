"""The state of one thread on the host, and the first release that contains its merge commit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime, timezone
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from packaging.version import InvalidVersion, Version

from megacpp_overlays.upkeep.sweep.host_errors import GoneError, NoAnswerError
from megacpp_overlays.upkeep.sweep.threads import API, CLOSED, DRAFT, ISSUE, MERGED, OPEN, PULL, Answer

if TYPE_CHECKING:
    from megacpp_overlays.upkeep.sweep.github import Client


@dataclass(frozen=True, slots=True)
class Lookup:
    """An answer, with the repository that is needed to find its release."""

    answer: Answer
    repository: str
    """The repository of the merge commit: the thread's own, or the one that it moved to."""

    @classmethod
    def of(cls, answer: Answer) -> Lookup:
        """Return the lookup of an answer, without a request."""
        return cls(answer, (answer.moved_to or answer.repository).partition("#")[0])


def version_of(tag: str) -> str:
    """Return the version that a tag names: `core_v0.19.0` -> `0.19.0`."""
    found = re.search(r"\d+(\.\d+)+\S*", tag)
    return found[0] if found else tag


def ask(client: Client, repository: str, number: int, saved: Answer | None, today: date) -> Lookup:
    """Return the present state of a thread on the host, with the release from its saved answer.

    A known pull request takes one request, any other thread one or two: the endpoint of issues also answers for pull
    requests, but without branch and commit.

    Raises:
        HostError: see its subclasses.
    """
    where = f"{repository}#{number}"
    if saved is not None and saved.kind == PULL:
        try:
            pull = client.get(f"/repos/{repository}/pulls/{number}")
        except GoneError:
            pull = None  # it may be an issue after all
    else:
        pull = None
    if pull is None:
        issue = client.get(f"/repos/{repository}/issues/{number}")
        if not issue.get("pull_request"):
            return _asked(where, issue, saved, today)
        pull = client.get(f"/repos/{repository}/pulls/{number}")
    return _asked(where, pull, saved, today)


def _asked(where: str, data: Mapping[str, Any], saved: Answer | None, today: date) -> Lookup:
    try:
        return _read(where, data, saved, today)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise NoAnswerError(f"{where}: the answer of the host lacks an expected field: {error}") from error


def _read(where: str, data: Mapping[str, Any], saved: Answer | None, today: date) -> Lookup:
    repository, number = where.split("#")
    kind = PULL if "base" in data else ISSUE
    merged, base = _day(data.get("merged_at")), data.get("base")
    state = MERGED if merged else DRAFT if data.get("draft") and data["state"] == OPEN else data["state"]
    if state not in {OPEN, DRAFT, CLOSED, MERGED}:
        raise ValueError(f"state {state!r}")
    reason = data.get("state_reason") if state == CLOSED else None
    if not isinstance(reason, str | None):
        raise TypeError(f"state_reason {reason!r}")
    # Before a merge the host puts the commit of a trial merge here.
    commit = str(data["merge_commit_sha"]) if merged else None
    now = _place(data["html_url"])
    same_commit = saved is not None and saved.merge_commit == commit and commit is not None
    answer = Answer(
        repository=repository,
        number=int(number),
        kind=kind,
        state=state,
        reason=reason,
        created=_day(data["created_at"]),
        closed=_day(data["closed_at"]),
        merged=merged,
        merge_commit=commit,
        base=str(base["ref"]) if base else None,
        released_in=saved.released_in if saved and same_commit else None,
        released=saved.released if saved and same_commit else None,
        prerelease=saved.prerelease if saved and same_commit else None,
        releases_checked=saved.releases_checked if saved and same_commit else None,
        moved_to=now if now.lower() != where.lower() else None,
        checked=today,
        source=API,
        declared=saved.declared if saved else None,
    )
    return Lookup(answer, now.partition("#")[0])


def _day(text: str | None) -> date | None:
    if text is None:
        return None
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(timezone.utc).date()


def _place(address: str) -> str:
    found = re.search(r"/([^/]+/[^/]+)/(?:issues|pull)/(\d+)$", address)
    if found is None:
        raise ValueError(f"html_url {address!r}")
    return f"{found[1]}#{found[2]}"


@dataclass(frozen=True, slots=True)
class PublishedRelease:
    """One published release."""

    tag: str
    published: date
    prerelease: bool


class ReleaseSearch:
    """Search in the releases of repositories, which lists the releases of each repository once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._listed: dict[str, tuple[date, tuple[PublishedRelease, ...]]] = {}

    def find(self, asked: Lookup, today: date) -> Answer:
        """Return the answer with the first release that contains its merge commit, or with no release as of this day.

        Every release since the merge is checked, oldest first: a release of an older line may have a commit that a newer
        one lacks. A pre-release counts only where no release has the commit.

        Raises:
            HostError: see its subclasses; the given answer is still valid.
        """
        answer = asked.answer
        if answer.merged is None or answer.merge_commit is None:
            return answer
        later = [each for each in self._since(asked.repository, answer.merged) if each.published >= answer.merged]
        full = [each for each in later if not each.prerelease]
        trials = [each for each in later if each.prerelease][-1:]

        def contains(release: PublishedRelease) -> bool:
            return self._contains(asked.repository, str(answer.merge_commit), release)

        found = next(filter(contains, full), None)
        trial = None if found else next(filter(contains, trials), None)
        return replace(
            answer,
            released_in=found.tag if found else None,
            released=found.published if found else None,
            prerelease=trial.tag if trial else None,
            releases_checked=today,
        )

    def _since(self, repository: str, day: date) -> tuple[PublishedRelease, ...]:
        """Return the releases of a repository, oldest first, at least those published since a day."""
        known = self._listed.get(repository)
        if known and known[0] <= day:
            return known[1]
        found: list[PublishedRelease] = []
        for page in self._client.pages(f"/repos/{repository}/releases?per_page=100"):
            try:
                on_page = [_release(each) for each in page if not each["draft"]]
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise NoAnswerError(f"{repository}: a release lacks an expected field: {error}") from error
            found += on_page
            if on_page and max(each.published for each in on_page) < day:
                break
        ordered = tuple(sorted(found, key=lambda each: (each.published, each.tag)))
        self._listed[repository] = (day, ordered)
        return ordered

    def _contains(self, repository: str, commit: str, release: PublishedRelease) -> bool:
        path = f"/repos/{repository}/compare/{commit}...{quote(release.tag, safe='')}?per_page=1"
        status = self._client.get(path).get("status")
        if status not in ("ahead", "identical", "behind", "diverged"):
            raise NoAnswerError(f"{repository}: {commit[:12]} against {release.tag}: status {status!r}")
        return status in ("ahead", "identical")


def _release(data: Mapping[str, Any]) -> PublishedRelease:
    tag, published = str(data["tag_name"]), _day(data["published_at"])
    if published is None:
        raise ValueError(f"{tag} has no date")
    try:
        trial = Version(version_of(tag)).is_prerelease
    except InvalidVersion:
        trial = False  # then the host's flag decides
    return PublishedRelease(tag, published, trial or data["prerelease"] is True)
