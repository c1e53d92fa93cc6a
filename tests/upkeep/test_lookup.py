"""Answers of the host of threads: the state of a thread, and the first release that contains a merge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from typing import Any

import github_host
import pytest
from github_host import Host, release
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_answers import answer, merged

from megacpp_overlays.upkeep.sweep.github import Client
from megacpp_overlays.upkeep.sweep.host_errors import GoneError, NoAnswerError
from megacpp_overlays.upkeep.sweep.lookup import Lookup, ReleaseSearch, ask, version_of
from megacpp_overlays.upkeep.sweep.threads import Answer

TODAY = date(2026, 11, 21)
COMMIT = "a" * 40
REPOSITORY = "o/r"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("no_proxy", "*")
    with github_host.running() as host:
        yield host


@pytest.fixture
def client(host: Host) -> Client:
    return Client(host.address, None, backoff=0.01)


def look(client: Client, saved: Answer | None = None) -> Answer:
    return ask(client, REPOSITORY, 1, saved, TODAY).answer


def test_an_issue_costs_one_request(host: Host, client: Client) -> None:
    host.issue(REPOSITORY, 1, state="closed", state_reason="not_planned", closed_at="2026-06-17T08:00:00Z")

    found = look(client)

    assert found == answer(
        kind="issue", state="closed", reason="not_planned", closed=date(2026, 6, 17), base=None, checked=TODAY
    )
    assert len(host.requests) == 1


def test_a_pull_request_that_is_known_as_one_costs_one_request(host: Host, client: Client) -> None:
    host.pull(REPOSITORY, 1, **github_host.merged("2026-07-30", COMMIT))

    found = look(client, answer())

    assert found == merged(checked=TODAY, releases_checked=None)
    assert host.paths() == ["/repos/o/r/pulls/1"]


def test_a_thread_of_unknown_kind_is_asked_as_an_issue_first(host: Host, client: Client) -> None:
    host.issue(REPOSITORY, 1, pull_request={"merged_at": None, "url": "u"})
    host.pull(REPOSITORY, 1)

    found = look(client)

    assert (found.kind, found.state, found.base) == ("pull request", "open", "main")
    assert len(host.requests) == 2


MEANT: dict[str, tuple[str, dict[str, Any], str, object]] = {
    "a thread that was taken for a pull request may be an issue": ("issue", {}, "kind", "issue"),
    "a reason is not kept after a reopening": ("issue", {"state_reason": "reopened"}, "reason", None),
    "a name in other letters is no move": ("issue", {"html_url": "https://github.com/O/R/issues/1"}, "moved_to", None),
    "the commit of a trial merge is not kept": ("pull", {}, "merge_commit", None),
    "a draft": ("pull", {"draft": True}, "state", "draft"),
    "a draft is one only while it is open": (
        "pull",
        {"draft": True, "state": "closed", "closed_at": "2026-07-01T00:00:00Z"},
        "state",
        "closed",
    ),
    "days are UTC": ("pull", {"created_at": "2025-08-21T20:12:59-07:00"}, "created", date(2025, 8, 22)),
}
"""Answers of the host, each with the expected value of one field of ours."""


@pytest.mark.parametrize("meaning", MEANT)
def test_a_field_has_the_meaning_that_the_host_gives_it(host: Host, client: Client, meaning: str) -> None:
    kind, changes, field, value = MEANT[meaning]
    getattr(host, kind)(REPOSITORY, 1, **changes)

    assert getattr(look(client, answer()), field) == value


def test_a_thread_that_moved_says_where_it_is_now(host: Host, client: Client) -> None:
    host.put("/repos/o/r/issues/1", github_host.Reply(None, 301, {"Location": "/repositories/7/issues/5"}))
    host.put("/repositories/7/issues/5", github_host.issue("other/home", 5))

    found = look(client)

    assert found.key == ("o/r", 1)
    assert found.moved_to == "other/home#5"


def test_a_thread_is_gone_only_after_both_questions(host: Host, client: Client) -> None:
    with pytest.raises(GoneError):
        look(client, answer())

    assert host.paths() == ["/repos/o/r/pulls/1", "/repos/o/r/issues/1"]


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "half open"},
        {"html_url": None},
        {"html_url": "https://github.com/o/r"},
        {"created_at": "yesterday"},
        {"created_at": "0001-01-01T00:00:00+23:59"},
        {"state": ["open"]},
        {"merged_at": 12},
        {"base": {"label": "o:main"}},
        {"base": "main"},
    ],
    ids=str,
)
def test_an_answer_that_lacks_a_field_is_a_failed_one(host: Host, client: Client, changes: dict[str, Any]) -> None:
    host.pull(REPOSITORY, 1, **changes)

    with pytest.raises(NoAnswerError, match=r"o/r#1: the answer of the host lacks"):
        look(client, answer())


def test_a_reason_that_is_no_word_is_a_failed_answer(host: Host, client: Client) -> None:
    host.issue(REPOSITORY, 1, state="closed", state_reason=["completed"])

    with pytest.raises(NoAnswerError, match="state_reason"):
        look(client, answer(kind="issue", base=None))


def test_the_known_release_stays_while_the_commit_is_the_same(host: Host, client: Client) -> None:
    known = merged(released_in="v1.0", released=date(2026, 8, 18), source="stored copy")
    host.pull(REPOSITORY, 1, **github_host.merged("2026-07-30", COMMIT))

    same = look(client, known)
    other = look(client, replace(known, merge_commit="f" * 40))

    assert (same.released_in, same.released) == ("v1.0", date(2026, 8, 18))
    assert (other.released_in, other.released, other.releases_checked) == (None, None, None)


@pytest.mark.parametrize(
    ("tag", "version"),
    [("v0.8.2", "0.8.2"), ("core_v0.19.0", "0.19.0"), ("v2.3.2.post1", "2.3.2.post1"), ("0.1.6", "0.1.6"), ("x", "x")],
)
def test_a_tag_names_a_version(tag: str, version: str) -> None:
    assert version_of(tag) == version


def find(client: Client, known: Answer) -> Answer:
    return ReleaseSearch(client).find(Lookup.of(known), TODAY)


def test_the_first_release_with_the_commit_is_found(host: Host, client: Client) -> None:
    host.releases(
        REPOSITORY,
        release("v0.8.3", "2026-09-01"),
        release("v0.8.2", "2026-08-18"),
        release("v0.8.1", "2026-08-02"),
        release("v0.8.0", "2026-04-30"),
    )
    host.compare(REPOSITORY, COMMIT, "v0.8.1", "diverged")
    host.compare(REPOSITORY, COMMIT, "v0.8.2", "ahead")

    found = find(client, merged())

    assert (found.released_in, found.released, found.releases_checked) == ("v0.8.2", date(2026, 8, 18), TODAY)
    assert not [path for path in host.paths() if "v0.8.3" in path or "v0.8.0" in path]


def test_a_merge_in_no_release_says_when_that_was_seen(host: Host, client: Client) -> None:
    host.releases(REPOSITORY, release("v1.0.1", "2026-08-18"))
    host.compare(REPOSITORY, COMMIT, "v1.0.1", "diverged")

    found = find(client, merged())

    assert (found.released_in, found.releases_checked) == (None, TODAY)


def test_drafts_of_releases_are_none(host: Host, client: Client) -> None:
    host.releases(REPOSITORY, release("v1.1", "2026-08-18", draft=True, published_at=None))

    assert find(client, merged()).released_in is None


@pytest.mark.parametrize("trial", [release("v1.1rc1", "2026-08-18"), release("v1.1", "2026-08-18", prerelease=True)])
def test_a_pre_release_counts_only_where_no_release_does(host: Host, client: Client, trial: dict[str, Any]) -> None:
    host.releases(REPOSITORY, trial)
    host.compare(REPOSITORY, COMMIT, trial["tag_name"], "ahead")
    alone = find(client, merged())
    host.releases(REPOSITORY, release("v1.2", "2026-09-01"), trial)
    host.compare(REPOSITORY, COMMIT, "v1.2", "ahead")

    final = find(client, alone)

    assert (alone.released_in, alone.prerelease) == (None, trial["tag_name"])
    assert (final.released_in, final.prerelease) == ("v1.2", None)


@settings(max_examples=25, deadline=None)  # it asks a server
@given(
    st.lists(st.sampled_from(["ahead", "identical", "behind", "diverged"]), max_size=5),
    st.sampled_from(["main", "dev", "core_r0.18.0"]),
)
def test_the_first_release_with_the_commit_is_found_on_every_branch(statuses: list[str], base: str) -> None:
    every = [(release(f"v1.{minor}", f"2026-08-{minor:02}"), status) for minor, status in enumerate(statuses, 1)]
    with github_host.running() as host:
        host.releases(REPOSITORY, *[each for each, _ in reversed(every)])
        for each, status in every:
            host.compare(REPOSITORY, COMMIT, each["tag_name"], status)

        found = find(Client(host.address, None), merged(base=base))

    having = [each["tag_name"] for each, status in every if status in {"ahead", "identical"}]
    assert found.released_in == next(iter(having), None)


def test_releases_are_listed_once(host: Host, client: Client) -> None:
    host.releases(REPOSITORY, release("v1.1", "2026-08-18"))
    host.compare(REPOSITORY, COMMIT, "v1.1", "diverged")
    releases = ReleaseSearch(client)
    later, earlier = merged(), merged(day=date(2026, 3, 1))

    for known in (later, later, earlier, later):
        releases.find(Lookup.of(known), TODAY)

    assert len([path for path in host.paths() if "compare" not in path]) == 2  # once, and again for the earlier day


def test_pages_of_releases_are_read_back_to_the_merge(host: Host, client: Client) -> None:
    first = f"/repos/{REPOSITORY}/releases?per_page=100"
    pages = [[release("v3", "2026-10-01")], [release("v2", "2026-08-18")], [release("v1", "2026-01-01")]]
    for number, page in enumerate(pages):
        here = first if number == 0 else f"{first}&page={number}"
        link = {"Link": f'<{host.address}{first}&page={number + 1}>; rel="next"'}
        host.put(here, github_host.Reply(page, headers=link))
    host.compare(REPOSITORY, COMMIT, "v2", "ahead")

    assert find(client, merged()).released_in == "v2"
    assert host.paths()[:3] == [first, f"{first}&page=1", f"{first}&page=2"]


@pytest.mark.parametrize("broken", [{"published_at": None}, {"published_at": "soon"}, {"published_at": 5}], ids=str)
def test_a_release_that_lacks_a_field_is_a_failed_answer(host: Host, client: Client, broken: dict[str, Any]) -> None:
    host.releases(REPOSITORY, release("v1", "2026-08-18", **broken))

    with pytest.raises(NoAnswerError, match="a release lacks"):
        find(client, merged())


def test_a_comparison_that_says_nothing_known_is_a_failed_answer(host: Host, client: Client) -> None:
    host.releases(REPOSITORY, release("v1", "2026-08-18"))
    host.compare(REPOSITORY, COMMIT, "v1", "sideways")

    with pytest.raises(NoAnswerError, match="status 'sideways'"):
        find(client, merged())


def test_a_slash_in_a_tag_is_part_of_the_tag(host: Host, client: Client) -> None:
    host.releases(REPOSITORY, release("core/v1", "2026-08-18"))
    host.compare(REPOSITORY, COMMIT, "core%2Fv1", "ahead")

    assert find(client, merged()).released_in == "core/v1"


def test_the_release_of_a_thread_that_moved_is_looked_for_where_it_is_now(host: Host, client: Client) -> None:
    host.releases("other/home", release("v1", "2026-08-18"))
    host.compare("other/home", COMMIT, "v1", "ahead")

    assert find(client, merged(moved_to="other/home#5")).released_in == "v1"


def test_a_thread_that_was_not_merged_has_no_release(host: Host, client: Client) -> None:
    assert find(client, answer()) == answer()
    assert host.requests == []
