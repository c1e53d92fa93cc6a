"""`megacpp-overlays wave plan`: two to four ready packs for one repository, some days apart, and the reason for the rest."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_packs import Packs, thread

from megacpp_overlays import cli
from megacpp_overlays.repro.pack_file import PRIORITIES
from megacpp_overlays.upkeep.filing.waves import Plan, ReadyPack, plan

START = datetime.date(2026, 11, 23)
SENT = PRIORITIES[:-1]


def candidates(*facts: tuple[int, str, str]) -> list[ReadyPack]:
    return [ReadyPack(number=number, repository=target, priority=priority) for number, target, priority in facts]


def sent(found: Plan) -> list[int]:
    return [number for wave in found.waves for number in wave.numbers]


def test_what_crashes_a_run_goes_first_then_what_joins_a_thread_then_refactors_then_reports() -> None:
    ready = candidates((1, "a/a", "report"), (2, "a/a", "refactor"), (3, "a/a", "crash"), (4, "a/a", "piggyback"))

    (wave,) = plan(ready, START).waves

    assert wave.numbers == (3, 4, 2, 1)
    assert wave.date == START


def test_a_repository_with_more_than_four_gets_several_waves_and_none_of_one() -> None:
    ready = candidates(*((number, "a/a", "crash") for number in range(1, 6)))

    assert [wave.numbers for wave in plan(ready, START, 3).waves] == [(1, 2, 3), (4, 5)]
    assert [wave.date.day for wave in plan(ready, START, 3).waves] == [23, 26]


def test_a_wave_goes_to_one_repository_and_one_pack_alone_waits_for_company() -> None:
    ready = candidates((1, "a/a", "crash"), (2, "b/b", "crash"), (3, "b/b", "report"))

    found = plan(ready, START)

    assert [(wave.repository, wave.numbers) for wave in found.waves] == [("b/b", (2, 3))]
    assert found.waiting == {1: "the only ready pack for a/a: it waits for a second one"}


def test_another_repository_comes_before_a_second_wave_for_the_same_one() -> None:
    many = ((number, "a/a", "crash") for number in range(1, 7))
    found = plan(candidates(*many, (8, "b/b", "crash"), (9, "b/b", "crash")), START)

    assert [wave.repository for wave in found.waves] == ["a/a", "b/b", "a/a"]


@pytest.mark.parametrize("pause", [0, 1, 4, -2])
def test_another_pause_than_two_or_three_days_is_refused(pause: int) -> None:
    with pytest.raises(ValueError, match=f"a pause of {pause} days"):
        plan([], START, pause)


@pytest.mark.parametrize("priority", ["none", "someday"])
def test_what_is_never_sent_is_refused(priority: str) -> None:
    with pytest.raises(ValueError, match="is never sent"):
        plan(candidates((1, "a/a", priority)), START)


READY = st.lists(
    st.builds(
        ReadyPack,
        number=st.integers(1, 99),
        repository=st.sampled_from(["a/a", "b/b", "c/c"]),
        priority=st.sampled_from(SENT),
    ),
    unique_by=lambda each: each.number,
    max_size=40,
)


@given(ready=READY, pause=st.sampled_from([2, 3]))
def test_every_ready_pack_is_in_one_wave_or_waits_with_a_reason(ready: list[ReadyPack], pause: int) -> None:
    found = plan(ready, START, pause)

    assert sorted([*sent(found), *found.waiting]) == sorted(each.number for each in ready)
    assert all(found.waiting.values())


@given(ready=READY, pause=st.sampled_from([2, 3]))
def test_waves_are_of_two_to_four_packs_for_one_repository_and_a_pause_apart(
    ready: list[ReadyPack], pause: int
) -> None:
    found = plan(ready, START, pause)
    target = {each.number: each.repository for each in ready}

    assert all(2 <= len(wave.numbers) <= 4 for wave in found.waves)
    assert all({target[number] for number in wave.numbers} == {wave.repository} for wave in found.waves)
    assert [wave.date for wave in found.waves] == [
        START + datetime.timedelta(days=pause * index) for index in range(len(found.waves))
    ]


@given(ready=READY)
def test_no_pack_waits_for_one_of_the_same_repository_that_is_less_urgent(ready: list[ReadyPack]) -> None:
    rank = {each.number: (SENT.index(each.priority), each.number) for each in ready}
    target = {each.number: each.repository for each in ready}
    found = plan(ready, START)

    for repository in set(target.values()):
        order = [rank[number] for number in sent(found) if target[number] == repository]
        assert order == sorted(order)
        waits = [number for number in found.waiting if target[number] == repository]
        assert not waits or (len(waits) == 1 and not order)


@given(ready=READY, other=st.randoms(use_true_random=False))
def test_the_order_in_which_packs_are_given_changes_nothing(ready: list[ReadyPack], other: object) -> None:
    shuffled = list(ready)
    other.shuffle(shuffled)  # type: ignore[attr-defined]

    assert plan(ready, START) == plan(shuffled, START)


# The command


@pytest.fixture
def packs(tmp_path: Path) -> Packs:
    """Three ready packs and one that is none, for one repository; one alone for another; one that is fixed."""
    made = Packs(tmp_path / "packs")
    made.ready(91, priority="report")
    made.ready(92, priority="piggyback", upstream="overlap", more=thread(7))
    (made.ready(93, priority="crash") / "0001-fix.diff").write_text("--- a/layers.py\n")
    made.ready(94, repository="lone/ly")
    made.write(95, kind="bug report", reproducer=None)
    made.write(96, kind="bug report", upstream="fixed")
    made.answer(7)
    made.synchronise()
    return made


def test_the_plan_says_when_and_how_each_is_sent_and_what_the_others_lack(
    packs: Packs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["wave", "plan", "--start", "2026-11-23", "--packs", str(packs.folder)]) == 0

    text = capsys.readouterr().out
    assert "wave 1: 2026-11-23, made/up" in text
    rows = [line.split()[:2] for line in text.splitlines() if line.startswith("  9") and "crash" in line]
    assert rows == [["93", "crash"]]
    assert "comment on made/up#7, and open no competing one" in text
    assert "new pull request in made/up" in text
    assert "new issue in made/up" in text
    assert text.index("  93  ") < text.index("  92  ") < text.index("  91  ")
    assert "the only ready pack for lone/ly: it waits for a second one" in text
    assert "lacks a reproduce.py" in text
    assert "fixed upstream: it is not filed" in text
    assert "next, for each on its day: megacpp-overlays pack check NN" in text


def test_the_plan_for_machines_says_the_same(packs: Packs, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["wave", "plan", "--start", "2026-11-23", "--pause", "3", "--packs", str(packs.folder), "--json"]) == 0
    )

    data = json.loads(capsys.readouterr().out)
    (wave,) = data["waves"]
    assert (wave["date"], wave["repository"]) == ("2026-11-23", "made/up")
    assert [(each["number"], each["priority"]) for each in wave["packs"]] == [
        (93, "crash"),
        (92, "piggyback"),
        (91, "report"),
    ]
    assert {each["number"]: each["reasons"][0] for each in data["others"]} == {
        94: "the only ready pack for lone/ly: it waits for a second one",
        95: "lacks a reproduce.py",
        96: "fixed upstream: it is not filed, and becomes a regression guard",
    }


def test_where_nothing_is_ready_that_is_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packs = Packs(tmp_path)
    packs.write(91, kind="held")
    packs.synchronise()

    assert cli.main(["wave", "plan", "--packs", str(tmp_path)]) == 0

    text = capsys.readouterr().out
    assert "no wave: 0 of 1 packs are ready" in text
    assert "it is held" in text


def test_a_ready_pack_whose_claims_do_not_hold_is_in_no_wave(packs: Packs, capsys: pytest.CaptureFixture[str]) -> None:
    (packs.folder / "91-double" / "reproduce.py").write_text("CASES = ()\n")

    assert cli.main(["wave", "plan", "--packs", str(packs.folder), "--json"]) == 0

    data = json.loads(capsys.readouterr().out)
    assert [each["number"] for each in data["waves"][0]["packs"]] == [93, 92]
    (lacks,) = next(each["reasons"] for each in data["others"] if each["number"] == 91)
    assert lacks == "lacks a claim that holds: its state is ready, and no receipt shows BUG_REPRODUCED"


def test_an_overlap_whose_threads_are_all_closed_is_in_no_wave(
    packs: Packs, capsys: pytest.CaptureFixture[str]
) -> None:
    packs.answer(7, "closed")

    assert cli.main(["wave", "plan", "--packs", str(packs.folder), "--json"]) == 0

    data = json.loads(capsys.readouterr().out)
    assert [each["number"] for each in data["waves"][0]["packs"]] == [93, 91]
    (reason,) = next(each["reasons"] for each in data["others"] if each["number"] == 92)
    assert reason.endswith("its pack.toml says overlap, and none of its threads there is open")


def test_where_every_pack_is_in_a_wave_nothing_else_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packs = Packs(tmp_path)
    packs.ready(91)
    packs.ready(92)
    packs.synchronise()

    assert cli.main(["wave", "plan", "--packs", str(tmp_path)]) == 0

    assert "not in a wave" not in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--pause", "1"], ["--start", "tomorrow"], ["--yes"]])
def test_wrong_usage_ends_with_two(options: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["wave", "plan", *options])

    assert ended.value.code == 2


def test_the_packs_of_this_repository_have_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["wave", "plan", "--json"]) == 0

    data = json.loads(capsys.readouterr().out)
    named = [each["number"] for each in data["others"]] + [
        each["number"] for wave in data["waves"] for each in wave["packs"]
    ]
    assert sorted(named) == sorted(set(named))
    assert all(each["reasons"] for each in data["others"])
