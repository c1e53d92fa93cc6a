"""Who waits on a thread, and when what is declared of it is not so."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from made_up import Upstream
from made_up_packs import write_waiting_pack
from places import ROOT
from thread_answers import answer, merged

from megacpp_overlays.loader import registry
from megacpp_overlays.model import Thread
from megacpp_overlays.repro.case import PackError
from megacpp_overlays.upkeep.sweep import waiting
from megacpp_overlays.upkeep.sweep.threads import Answer
from megacpp_overlays.upkeep.sweep.waiting import contradiction


def test_threads_of_overlays_and_packs_are_listed_once_with_all_that_wait(upstream: Upstream, tmp_path: Path) -> None:
    packs = tmp_path / "packs"
    write_waiting_pack(packs, "05-another", 1)
    write_waiting_pack(packs, "06-alone", 2)
    (packs / "07-without-a-file").mkdir()
    one = upstream.overlay(threads=(Thread("o/r", 1, "open draft"),))
    two = upstream.overlay(id="other-fix", pack=4, threads=(Thread("o/r", 1, "open"), Thread("a/a", 9, "closed")))

    found = waiting.listed([one, two], packs)

    assert [(str(each), each.waiters()) for each in found] == [
        ("a/a#9", "other-fix"),
        ("o/r#1", "double-fix, other-fix, pack 05"),
        ("o/r#2", "pack 06"),
    ]
    assert [each.state for each in found[1].declared] == ["open draft", "open", "open"]
    assert found[1].declared[2].where == "packs/05-another/pack.toml"


def test_the_parts_of_an_overlay_wait_as_one(upstream: Upstream, tmp_path: Path) -> None:
    thread = Thread("o/r", 1, "open")
    parts = [upstream.overlay(threads=(thread,)), upstream.overlay(threads=(thread,), retire_when="never")]

    (found,) = waiting.listed(parts, tmp_path)

    assert found.overlays == (parts[0],)
    assert len(found.declared) == 1


def test_a_pack_whose_overlay_names_the_thread_does_not_wait_beside_it(upstream: Upstream, tmp_path: Path) -> None:
    write_waiting_pack(tmp_path, "99-made-up", 1)
    overlay = upstream.overlay(threads=(Thread("o/r", 1, "open"),))

    (found,) = waiting.listed([overlay], tmp_path)

    assert found.waiters() == "double-fix"
    assert len(found.declared) == 2


def test_a_pack_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    write_waiting_pack(tmp_path, "05-another", 0)

    with pytest.raises(PackError, match=r"05-another/pack\.toml"):
        waiting.listed([], tmp_path)


def test_declarations_of_this_repository_are_named_by_their_file() -> None:
    every = waiting.listed(registry.load(), ROOT / "packs")

    places = {declared.where for each in every for declared in each.declared}

    assert "overlays/liger_flce_none_backward.py" in places
    assert all((ROOT / place).is_file() for place in places)


def test_an_overlay_from_elsewhere_is_named_by_its_id(upstream: Upstream, tmp_path: Path) -> None:
    (found,) = waiting.listed([upstream.overlay(threads=(Thread("o/r", 1, "open"),))], tmp_path)

    assert found.declared[0].where == "the declaration of double-fix"


CLOSED = answer(state="closed", closed=date(2026, 6, 17))
RELEASED = merged(released_in="v0.8.2", released=date(2026, 8, 18), checked=date(2026, 8, 20))


@pytest.mark.parametrize(
    ("text", "known", "wrong"),
    [
        ("open", RELEASED, "is merged 2026-07-30 to main, in v0.8.2 (2026-08-18)"),
        ("open draft", answer(), "is open"),
        ("not merged at 2026-05-28", RELEASED, "is merged 2026-07-30 to main, in v0.8.2 (2026-08-18)"),
        ("open when last seen, a fused loss", CLOSED, "is closed 2026-06-17"),
        ("closed", answer(), "is open"),
        ("closed", merged(), "is merged 2026-07-30 to main, in no release on 2026-08-01"),
        ("merged to dev 2026-07-18", CLOSED, "is closed 2026-06-17"),
        ("merged 2026-07-10", merged(), "was merged 2026-07-30"),
        ("merged to main 2026-07-10, x", merged(), "was merged 2026-07-30"),
        ("closed 2026-06-10, superseded", CLOSED, "was closed 2026-06-17"),
        ("merged to dev 2026-07-30", merged(), "went to main"),
        ("merged 2026-07-30 to dev; lengths still read", merged(), "went to main"),
        ("merged 2026-07-30, in 0.8.3", RELEASED, "is in v0.8.2"),
        ("merged 2026-07-30, unreleased", RELEASED, "is in v0.8.2"),
        ("merged 2026-07-30, in 0.8.2", merged(), "is in no release on 2026-08-01"),
        ("merged to dev 2026-07-10, in 0.8.3", RELEASED, "was merged 2026-07-30; went to main; is in v0.8.2"),
    ],
)
def test_what_is_declared_and_not_so_is_said(text: str, known: Answer, wrong: str) -> None:
    assert contradiction(text, known) == wrong


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("open", answer()),
        ("open", answer(state="draft")),
        ("open draft", answer(state="draft")),
        ("not merged at 2026-08-01", CLOSED),
        ("closed 2026-06-17, superseded by 5243 to 5247", CLOSED),
        ("closed", answer(state="closed")),
        ("merged 2026-07-30, in 0.8.2", RELEASED),
        ("merged 2026-07-29, with the branch", merged()),
        ("merged 2026-07, reverted by #3218", merged()),
        ("merged to main 2026-07-30, unreleased", merged()),
        ("merged 2026-07-30, in 0.8.2", merged(releases_checked=None)),
        ("merged 2026-07-30, in 0.8.2rc1", merged(prerelease="v0.8.2rc1")),
        ("merged to dev 2026-07-30", merged(base=None)),
        ("not checked", RELEASED),
    ],
)
def test_what_is_declared_and_so_is_not_said(text: str, known: Answer) -> None:
    assert contradiction(text, known) is None


def test_an_answer_older_than_the_declaration_says_nothing_against_it() -> None:
    old = answer(checked=date(2026, 7, 29))

    assert contradiction("merged 2026-07-30", old) is None
    assert contradiction("merged 2026-07-28", old) == "is open"


def test_an_unknown_state_says_nothing_against_a_declaration() -> None:
    assert contradiction("merged 2026-07-30", answer(state=None)) is None
