"""`megacpp-overlays sweep`: upstream changes that landed since the last run, and overlays that may retire because of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import github_host
import pytest
from github_host import NOT_FOUND, Host, Reply, release
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import Upstream
from made_up_packs import Packs, thread
from places import ROOT
from thread_answers import DAY, answer, answers, merged

from megacpp_overlays import cli
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.loader import registry
from megacpp_overlays.loader import session as sessions
from megacpp_overlays.loader.session import Session
from megacpp_overlays.model import Thread
from megacpp_overlays.upkeep.sweep import sweep, sweep_report, threads, waiting
from megacpp_overlays.upkeep.sweep.github import Client
from megacpp_overlays.upkeep.sweep.sweep import as_of, landed, news
from megacpp_overlays.upkeep.sweep.threads import Answer

COMMIT = "a" * 40


@settings(deadline=None)
@given(answers, st.dates(), st.sampled_from(["api", "stored copy"]))
def test_another_look_at_an_unchanged_thread_says_nothing_new(known: Answer, day: date, source: str) -> None:
    again = replace(known, checked=day, source=source, releases_checked=day)

    assert news(known, again) is None
    assert not landed(known, again)


@settings(deadline=None)
@given(answers, answers)
def test_a_change_that_lands_is_news(before: Answer, after: Answer) -> None:
    if landed(before, after):
        assert news(before, after)


@settings(deadline=None)
@given(answers, st.dates(date(2024, 1, 1), date(2027, 1, 1)))
def test_an_answer_as_of_a_day_knows_of_nothing_that_came_later(known: Answer, day: date) -> None:
    then = as_of(known, day)

    if then is not None:
        assert not [name for name in ("created", "merged", "released") if (getattr(then, name) or date.min) >= day]
        assert as_of(then, day) == then


@pytest.mark.parametrize(
    ("before", "after", "words", "lands"),
    [
        (answer(), merged(), "merged 2026-07-30 to main, in no release on 2026-08-01 (was open)", True),
        (answer(state=None), merged(base="dev", releases_checked=None), "merged 2026-07-30 to dev (was unknown)", True),
        (None, merged(releases_checked=None), "merged 2026-07-30 to main (was unknown)", True),
        (
            merged(),
            merged(released_in="v1", released=date(2026, 8, 18)),
            "released: merged 2026-07-30 to main, in v1 (2026-08-18)",
            True,
        ),
        (
            merged(),
            merged(prerelease="v1rc1"),
            "released: merged 2026-07-30 to main, only in the pre-release v1rc1",
            False,
        ),
        (answer(), answer(state="closed", closed=DAY), "closed 2026-08-01 (was open)", False),
        (
            answer(),
            answer(state="closed", closed=DAY, reason="completed"),
            "closed 2026-08-01, completed (was open)",
            True,
        ),
        (
            answer(),
            answer(state="closed", closed=DAY, reason="not_planned"),
            "closed 2026-08-01, not planned (was open)",
            False,
        ),
        (answer(state="closed", closed=DAY), answer(), "reopened (was closed)", False),
        (answer(state="draft"), answer(), "ready for review (was draft)", False),
        (answer(), answer(state="draft"), "a draft again (was open)", False),
        (None, answer(), "open (was unknown)", False),
        (answer(), answer(base="dev"), "now for dev", False),
        (answer(), answer(moved_to="p/q#2"), "moved to p/q#2", False),
        (answer(base=None, created=None), answer(), None, False),
    ],
)
def test_news_of_a_thread_are_in_words(before: Answer | None, after: Answer, words: str | None, lands: bool) -> None:
    assert news(before, after) == words
    assert landed(before, after) is lands


@dataclass
class Scene:
    """A made-up overlay that waits on o/r#1, a pack that waits on o/r#2, and a host."""

    host: Host
    packs: Path
    run: Callable[..., int]

    def saved(self) -> dict[tuple[str, int], Answer]:
        return dict(threads.read(self.packs))


@pytest.fixture
def scene(
    tmp_path: Path, upstream: Upstream, session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scene]:
    overlay = upstream.overlay(threads=(Thread("o/r", 1, "open when last seen"),))
    made = session(overlay)
    monkeypatch.setattr(sessions, "current", lambda: made)
    for name in ("GITHUB_TOKEN", "GH_TOKEN", "GITHUB_API_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "*")
    packs = tmp_path / "packs"
    Packs(packs).write(5, reproducer=None, more=thread(2, "o/r"))
    known = [answer(number=1, declared="open"), answer(number=2, declared="open", kind="issue", base=None)]
    threads.write(packs, known)
    with github_host.running() as host:
        host.pull("o/r", 1)
        host.issue("o/r", 2)

        def run(*arguments: str, api: str = host.address) -> int:
            return cli.main(["sweep", "--packs", str(packs), "--api", api, *arguments])

        yield Scene(host, packs, run)


def test_an_unchanged_world_says_nothing_new_and_exits_0(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    assert scene.run() == 0

    out = capsys.readouterr().out
    assert "2 threads: nothing new, nothing landed; asked" in out
    assert "Since the last look" not in out
    assert "Up for retirement" not in out


def land(scene: Scene, **changes: Any) -> None:
    scene.host.pull("o/r", 1, **github_host.merged("2026-09-01", COMMIT, **changes))


def test_a_merge_that_is_released_puts_its_overlay_up_for_retirement(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    land(scene)
    scene.host.releases("o/r", release("v1.1", "2026-09-02"))
    scene.host.compare("o/r", COMMIT, "v1.1", "ahead")

    assert scene.run() == 1

    out = capsys.readouterr().out
    assert "o/r#1: merged 2026-09-01 to main, in v1.1 (2026-09-02) (was open)" in out
    assert "Up for retirement (landing is no proof: the probe decides):" in out
    assert "double-fix (pack 99)" in out
    assert "deleted when upstream doubles without adding one" in out
    assert "next: megacpp-overlays matrix double-fix; megacpp-overlays triage" in out
    assert "1 new, 1 landed" in out


def test_a_merge_without_a_release_is_looked_for_in_a_checkout(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    land(scene, branch="dev")
    scene.host.releases("o/r", release("v1.1", "2026-09-02"))
    scene.host.compare("o/r", COMMIT, "v1.1", "diverged")

    assert scene.run() == 1

    out = capsys.readouterr().out
    assert "merged 2026-09-01 to dev, in no release on" in out
    assert "--tree CHECKOUT" in out


@pytest.mark.parametrize("step", ["repro 5", "pack list"])
def test_an_issue_that_was_completed_puts_its_pack_up(
    scene: Scene, capsys: pytest.CaptureFixture[str], step: str
) -> None:
    if step.startswith("repro"):
        (scene.packs / "05-double" / "reproduce.py").touch()
    scene.host.issue("o/r", 2, state="closed", state_reason="completed", closed_at="2026-09-01T00:00:00Z")

    assert scene.run() == 1

    out = capsys.readouterr().out
    assert "pack 05\n" in out
    assert f"next: megacpp-overlays {step}\n" in out


def test_only_write_keeps_the_answers(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    land(scene)
    scene.host.releases("o/r")
    before = scene.saved()

    scene.run()
    assert scene.saved() == before
    assert "--write keeps these answers" in capsys.readouterr().err

    scene.run("--write")
    assert scene.saved()["o/r", 1].state == "merged"
    assert "--write keeps" not in capsys.readouterr().err


def test_a_kept_answer_is_no_news_and_still_contradicts_the_declaration(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    land(scene)
    scene.host.releases("o/r")
    scene.run("--write")
    capsys.readouterr()

    assert scene.run() == 1

    out = capsys.readouterr().out
    assert "nothing new, nothing landed" in out
    assert "Declared otherwise:" in out
    assert (
        "o/r#1: the declaration of double-fix says 'open when last seen'; it is merged 2026-09-01 to main, in no release"
    ) in out
    assert "; change it there" in out


def test_a_thread_of_an_unknown_past_that_landed_counts_as_landed(scene: Scene) -> None:
    threads.write(scene.packs, [answer(number=2, kind="issue", base=None)])
    scene.host.issue("o/r", 1, pull_request={"merged_at": "2026-09-01T12:00:00Z"})
    land(scene)
    scene.host.releases("o/r")

    assert scene.run() == 1


def test_threads_that_no_overlay_waits_for_any_more_are_kept(scene: Scene) -> None:
    threads.write(scene.packs, [*scene.saved().values(), answer(number=77)])

    scene.run("--write")

    assert ("o/r", 77) in scene.saved()


def test_a_final_answer_is_not_asked_for_again(scene: Scene) -> None:
    threads.write(scene.packs, [merged(released_in="v1", number=1), answer(number=2, kind="issue", base=None)])

    scene.run()

    assert scene.host.paths() == ["/repos/o/r/issues/2"]


def test_a_stored_copy_is_asked_for_even_if_it_says_released(scene: Scene) -> None:
    known = merged(released_in="v1", released=date(2026, 9, 2), day=date(2026, 9, 1), source="stored copy")
    threads.write(scene.packs, [known, answer(number=2, kind="issue", base=None)])
    land(scene)

    scene.run("--write")

    assert scene.saved()["o/r", 1].final
    assert "/repos/o/r/pulls/1" in scene.host.paths()


@pytest.mark.parametrize(
    ("reply", "says"),
    [(Reply(b"<html>"), "the answer is not the JSON that it should be"), (NOT_FOUND, "not there")],
    ids=["no answer", "gone"],
)
def test_a_thread_without_an_answer_keeps_the_old_one_and_is_named(
    scene: Scene, capsys: pytest.CaptureFixture[str], reply: Reply, says: str
) -> None:
    scene.host.put("/repos/o/r/pulls/1", reply)
    scene.host.issue("o/r", 2, state="closed", state_reason="not_planned", closed_at="2026-09-01T00:00:00Z")

    assert scene.run("--write") == 1

    out = capsys.readouterr().out
    assert "No answer this time:" in out
    [line] = [line for line in out.splitlines() if f"o/r#1: {scene.host.address}/repos/o/r/" in line]
    assert says in line
    assert scene.saved()["o/r", 1] == answer(number=1, declared="open")
    assert scene.saved()["o/r", 2].reason == "not_planned"


def test_a_release_that_cannot_be_looked_for_leaves_the_merge(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    land(scene)

    assert scene.run("--write") == 1

    assert "o/r#1: " in capsys.readouterr().out.partition("No answer this time:")[2]
    kept = scene.saved()["o/r", 1]
    assert (kept.state, kept.released_in, kept.releases_checked) == ("merged", None, None)


def test_a_spent_budget_keeps_the_answers_so_far_and_names_the_time_of_the_next(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    land(scene)
    scene.host.budget = 1

    assert scene.run("--write") == 1

    out = capsys.readouterr().out
    assert "stopped early: the host takes no more requests until" in out
    assert "run it again then; with --write it goes on where it ended" in out
    assert "o/r#2: the host takes no more requests" in out
    assert scene.saved()["o/r", 1].state == "merged"


def test_a_budget_that_ends_between_states_and_releases_is_taken_up_next_time(scene: Scene) -> None:
    land(scene)
    scene.host.budget = 2
    scene.host.releases("o/r", release("v1.1", "2026-09-02"))
    scene.host.compare("o/r", COMMIT, "v1.1", "ahead")
    scene.run("--write")
    assert scene.saved()["o/r", 1].released_in is None
    scene.host.budget = 60

    scene.run("--write")

    assert scene.saved()["o/r", 1].released_in == "v1.1"


def test_a_host_without_answers_is_left_alone_after_four(scene: Scene, upstream: Upstream) -> None:
    every = [Thread("o/r", number, "open") for number in range(11, 19)]
    waited = waiting.listed([upstream.overlay(threads=tuple(every))], scene.packs / "none")
    for number in range(11, 19):
        scene.host.put(f"/repos/o/r/issues/{number}", Reply(b"<html>"))
    client = Client(scene.host.address, None)

    swept = sweep.from_host(waited, {}, client, DAY)

    assert len(scene.host.requests) == 4
    assert swept.stopped is not None
    assert "4 threads in a row" in swept.stopped
    assert all(each.failure for each in swept.threads)


def test_a_repository_without_answers_does_not_hide_the_others(scene: Scene) -> None:
    for number in range(11, 19):
        scene.host.put(f"/repos/a/closed/issues/{number}", Reply(b"<html>"))
    scene.host.issue("o/r", 19)
    waited = _waited(*[("a/closed", number) for number in range(11, 19)], ("o/r", 19))

    swept = sweep.from_host(waited, {}, Client(scene.host.address, None), DAY)

    assert [str(each.waiting) for each in swept.threads if each.now] == ["o/r#19"]


def test_a_release_is_looked_for_though_other_threads_got_no_answer(scene: Scene) -> None:
    land(scene)
    scene.host.issue("o/r", 1, pull_request={"url": "u"})
    scene.host.releases("o/r", release("v1.1", "2026-09-02"))
    scene.host.compare("o/r", COMMIT, "v1.1", "ahead")
    for number in range(11, 19):
        scene.host.put(f"/repos/o/r/issues/{number}", Reply(b"<html>"))
    waited = _waited(("o/r", 1), *[("o/r", number) for number in range(11, 19)])

    swept = sweep.from_host(waited, {}, Client(scene.host.address, None), DAY)

    assert "4 threads in a row" in str(swept.stopped)
    assert swept.threads[0].now
    assert swept.threads[0].now.released_in == "v1.1"


def test_who_was_not_asked_about_for_longest_is_the_first(scene: Scene) -> None:
    days = {1: DAY, 2: date(2026, 7, 1), 3: date(2026, 8, 20), 4: DAY - timedelta(1), 5: DAY - timedelta(2)}
    known = [answer(number=number, checked=day) for number, day in days.items()]
    known[1:3] = [replace(each, source="stored copy") for each in known[1:3]]
    for number in range(1, 7):
        scene.host.pull("o/r", number)
        scene.host.issue("o/r", number)
    waited = _waited(*[("o/r", number) for number in range(1, 7)])

    client = Client(scene.host.address, None)
    sweep.from_host(waited, {each.key: each for each in known}, client, DAY + timedelta(1))

    assert [int(path.rpartition("/")[2]) for path in scene.host.paths()] == [6, 2, 3, 5, 4, 1]


def test_an_answer_that_was_kept_today_is_not_asked_for_again(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    land(scene)
    scene.host.releases("o/r")
    scene.run("--write")
    before = len(scene.host.requests)
    capsys.readouterr()

    scene.run("--write")

    assert len(scene.host.requests) == before
    assert "0 requests to" in capsys.readouterr().err


@settings(max_examples=10, deadline=None)  # it asks a server
@given(st.data())
def test_a_small_budget_gets_to_every_thread_in_the_end(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(["issue", "open", "merged", "released"]), min_size=1, max_size=9))
    broken = data.draw(st.sets(st.integers(100, 199), max_size=3))
    budget = len(broken) + data.draw(st.integers(3, 6))
    known: dict[threads.Key, Answer] = {}
    waited = _waited(*[("o/r", number) for number in (*range(len(kinds)), *sorted(broken))])
    with github_host.running() as host:
        host.releases("o/r", release("v2", "2026-09-03"), release("v1", "2026-09-02"))
        for number, kind in enumerate(kinds):
            _serve_kind(host, number, kind)
        for number in broken:
            host.put(f"/repos/o/r/issues/{number}", Reply(b"<html>"))
        day = DAY
        for _ in range(4 * len(kinds)):
            if all(_is_done(known.get(("o/r", number)), kind) for number, kind in enumerate(kinds)):
                break
            host.budget = budget
            swept = sweep.from_host(waited, known, Client(host.address, None), day)
            known = {each.key: each for each in swept.answers(known)}
            day += timedelta(data.draw(st.integers(0, 1), label="days until the next run"))

    assert [number for number, kind in enumerate(kinds) if not _is_done(known.get(("o/r", number)), kind)] == []


def _is_done(found: Answer | None, kind: str) -> bool:
    if found is None or kind in {"issue", "open"}:
        return found is not None
    return found.releases_checked is not None and found.released_in == ("v2" if kind == "released" else None)


def _waited(*keys: threads.Key) -> list[waiting.WatchedThread]:
    return [waiting.WatchedThread(key, (), (), ()) for key in keys]


def _serve_kind(host: Host, number: int, kind: str) -> None:
    if kind == "issue":
        host.issue("o/r", number)
        return
    commit = f"{number:040x}"
    host.issue("o/r", number, pull_request={"url": "u"})
    host.pull("o/r", number, **(github_host.merged("2026-09-01", commit) if kind != "open" else {}))
    host.compare("o/r", commit, "v1", "diverged")
    host.compare("o/r", commit, "v2", "ahead" if kind == "released" else "diverged")


def test_a_token_that_is_not_taken_ends_the_sweep(
    scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GH_TOKEN", "secret")
    scene.host.put("/repos/o/r/pulls/1", Reply({"message": "Bad credentials"}, 401))

    assert scene.run() == ExitCode.NOT_CHECKED

    err = capsys.readouterr().err
    assert "does not take the token" in err
    assert "GITHUB_TOKEN or GH_TOKEN" in err
    assert "secret" not in err
    assert scene.host.requests[0].headers["Authorization"] == "Bearer secret"


def test_white_space_around_a_token_is_no_part_of_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the line end of the file that it was read from."""
    monkeypatch.setenv("GITHUB_TOKEN", "secret\n")

    assert scene.run() == 0

    assert scene.host.requests[0].headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("token", ["sec\nret", "sec\x1bret", "secr\u00e9t"], ids=ascii)
def test_a_token_that_can_be_none_is_refused_without_showing_it(
    scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", token)

    assert scene.run() == ExitCode.NOT_CHECKED

    out, err = capsys.readouterr()
    assert err == (
        "megacpp-overlays: the token in GITHUB_TOKEN or GH_TOKEN has characters that no token has; it is not shown here\n"
    )
    assert out == ""
    assert scene.host.requests == []


def test_without_a_network_the_saved_answers_are_used_with_their_age(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scene.run("--max-age", "9999", api="http://127.0.0.1:1") == ExitCode.CLEAN

    said = capsys.readouterr()
    assert "127.0.0.1:1 cannot be reached" in said.err
    assert "using the saved answers" in said.err
    assert "from saved answers, the oldest of 2026-08-01, " in said.out
    assert scene.host.requests == []


def test_a_network_that_goes_away_half_way_keeps_the_answers_so_far(scene: Scene) -> None:
    asked: list[str] = []

    class LeavingClient(Client):
        def get(self, path: str, *arguments: Any, **named: Any) -> Any:
            if asked:
                self.api = "http://127.0.0.1:1"
            asked.append(path)
            return super().get(path, *arguments, **named)

    land(scene)
    waited = waiting.listed(sessions.current().overlays, scene.packs)

    leaving = LeavingClient(scene.host.address, None, backoff=0.01)
    swept = sweep.from_host(waited, scene.saved(), leaving, DAY + timedelta(1))

    assert swept.online
    assert [each.now.state for each in swept.threads if each.now] == ["merged", "open"]
    assert "cannot be reached" in str(swept.threads[1].failure)


@pytest.mark.usefixtures("one_day")
def test_offline_sends_no_request_and_names_the_age_of_each_answer(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    known = answer(number=1, checked=date(2026, 8, 22), source="stored copy")
    threads.write(scene.packs, [known, answer(number=2, kind="issue", base=None)])

    assert scene.run("--offline", "--max-age", "9999") == ExitCode.CLEAN

    age = (datetime.now(timezone.utc).date() - known.checked).days
    assert f"2026-08-22, {age} days ago, stored copy" in capsys.readouterr().out
    assert scene.host.requests == []


@pytest.mark.parametrize(("final", "code"), [(False, ExitCode.OLD), (True, ExitCode.CLEAN)])
def test_old_saved_answers_count_only_for_threads_that_cannot_change(
    scene: Scene, capsys: pytest.CaptureFixture[str], final: bool, code: ExitCode
) -> None:
    today = datetime.now(timezone.utc).date()
    old = today - timedelta(days=31)
    first = merged(released_in="v1", released=date(2026, 8, 18), number=1) if final else answer(number=1)
    threads.write(scene.packs, [replace(first, checked=old), answer(number=2, kind="issue", base=None, checked=today)])

    assert scene.run("--offline") == code
    said = capsys.readouterr().err
    assert ("1 answers are more than 30 days old (--max-age)" in said) is not final

    assert scene.run("--offline", "--max-age", "31") == ExitCode.CLEAN


def test_offline_a_thread_without_an_answer_exits_1(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    (scene.packs / threads.NAME).unlink()

    assert scene.run("--offline") == 1

    out = capsys.readouterr().out
    assert "never looked up" in out
    assert out.rstrip().endswith("from saved answers")


def test_offline_with_a_day_lists_changes_that_landed_since(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    known = merged(released_in="v1", released=date(2026, 8, 18), number=1)
    threads.write(scene.packs, [known, answer(number=2, kind="issue", base=None)])

    scene.run("--offline", "--since", "2026-08-01")
    since_the_release = capsys.readouterr().out
    scene.run("--offline", "--since", "2026-07-01")
    since_the_merge = capsys.readouterr().out
    scene.run("--offline", "--since", "2026-09-01")
    since_nothing = capsys.readouterr().out

    assert "o/r#1: released: merged 2026-07-30 to main, in v1 (2026-08-18)" in since_the_release
    assert "o/r#1: merged 2026-07-30 to main, in v1 (2026-08-18) (was open)" in since_the_merge
    assert "nothing landed" in since_nothing


def test_a_thread_that_is_newer_than_the_day_is_new(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    scene.run("--since", "2026-01-01")

    assert "o/r#1: open (was unknown)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--since", "July"], ["--no-such-option"], ["--offline", "--write"]], ids=["day", "option", "both"]
)
def test_wrong_usage_exits_2(scene: Scene, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        scene.run(*arguments)

    assert caught.value.code == 2


def test_an_address_from_the_environment_is_used(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_API_URL", scene.host.address)

    assert cli.main(["sweep", "--packs", str(scene.packs)]) == 0

    assert len(scene.host.requests) == 2


def test_the_report_for_machines_says_the_same(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    land(scene)
    scene.host.releases("o/r")

    assert scene.run("--json") == 1

    said = json.loads(capsys.readouterr().out)
    assert (said["online"], said["clean"], said["stopped"]) == (True, False, None)
    assert said["retirement"][0]["overlay"] == "double-fix"
    assert said["retirement"][0]["threads"] == ["o/r#1"]
    one, two = said["threads"]
    assert (one["overlays"], one["landed"], one["answer"]["merge_commit"]) == (["double-fix"], True, COMMIT)
    assert one["contradictions"][0]["declared"] == "open when last seen"
    assert one["age_days"] == 0
    assert (two["packs"], two["news"], two["failure"]) == ([5], None, None)


def test_a_budget_that_the_host_tells_is_passed_on(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    scene.host.budget = 60

    scene.run()

    assert "2 requests to http://127.0.0.1" in (said := capsys.readouterr().err)
    assert "58 left" in said


def test_where_no_overlay_waits_there_is_nothing_to_say() -> None:
    swept = sweep.from_saved([], {}, DAY, None)

    assert swept.clean
    assert sweep_report.lines(swept)[-1].startswith("0 threads: nothing new, nothing landed")


def test_this_repository_can_be_swept_against_a_host_with_the_saved_answers(scene: Scene) -> None:
    saved = threads.read(ROOT / "packs")
    waited = waiting.listed(registry.load(), ROOT / "packs")
    for known in saved.values():
        _serve(scene.host, known)

    swept = sweep.from_host(waited, saved, Client(scene.host.address, None), date(2026, 11, 21))

    unknown = {each.waiting.key for each in swept.threads if each.before and each.before.state is None}
    assert {each.waiting.key for each in swept.threads if each.news} == unknown
    assert not [each for each in swept.threads if each.failure]
    assert not [each for each in swept.threads if each.landed]


def _serve(host: Host, known: Answer) -> None:
    """Make the host serve a saved answer. A thread whose state is unknown is open there."""
    state = {"draft": "open", "merged": "closed", None: "open"}.get(known.state, known.state)
    closed = f"{known.closed}T12:00:00Z" if known.closed else None
    common: dict[str, Any] = {"state": state, "closed_at": closed, "state_reason": known.reason}
    if known.kind == "pull request":
        pull = {**common, "draft": known.state == "draft", "branch": known.base or "main"}
        if known.state == "merged":
            moment = f"{known.merged or known.checked}T12:00:00Z"
            pull.update(merged_at=moment, merge_commit_sha=known.merge_commit or COMMIT)
        host.pull(known.repository, known.number, **pull)
    else:
        host.issue(known.repository, known.number, **common)
    host.releases(known.repository)
