"""`packs/threads.json`: the kept answers about upstream threads, and errors for a malformed file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from thread_answers import answer, answers, merged

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.loader import registry, retired
from megacpp_overlays.upkeep.sweep import threads, waiting
from megacpp_overlays.upkeep.sweep.threads import Answer

RULES = json.loads((ROOT / "packs" / threads.SCHEMA_NAME).read_text())


@settings(max_examples=40, deadline=None)  # it writes files
@given(st.lists(answers, unique_by=lambda each: each.key, max_size=4))
def test_written_answers_are_read_back(tmp_path_factory: pytest.TempPathFactory, every: list[Answer]) -> None:
    folder = tmp_path_factory.mktemp("packs")

    threads.write(folder, every)

    assert threads.read(folder) == {each.key: each for each in every}
    jsonschema.validate(json.loads((folder / threads.NAME).read_text()), RULES)


@settings(max_examples=40, deadline=None)  # it writes files
@given(st.lists(answers, unique_by=lambda each: each.key, max_size=4).flatmap(lambda a: st.permutations(a).map(list)))
def test_the_file_does_not_depend_on_the_order(tmp_path_factory: pytest.TempPathFactory, every: list[Answer]) -> None:
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")

    threads.write(one, every)
    threads.write(two, sorted(every, key=lambda each: each.key))

    assert (one / threads.NAME).read_text() == (two / threads.NAME).read_text()


def test_where_nothing_is_saved_nothing_is_known(tmp_path: Path) -> None:
    assert threads.read(tmp_path) == {}


def test_writing_leaves_nothing_else_behind(tmp_path: Path) -> None:
    threads.write(tmp_path, [answer()])

    assert [path.name for path in tmp_path.iterdir()] == [threads.NAME]


def test_a_folder_that_is_not_there_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UpkeepError, match="cannot write the answers: No such file"):
        threads.write(tmp_path / "nowhere", [answer()])


def _edited(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    threads.write(folder, [answer()])
    data = json.loads((folder / threads.NAME).read_text())
    edit(data)
    (folder / threads.NAME).write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("edit", "wrong"),
    [
        (lambda data: data.update(schema=2), "schema: 2 is none of 1"),
        (lambda data: data["threads"][0].pop("base"), "base is missing"),
        (lambda data: data["threads"][0].update(title="no"), "title is not known"),
        (lambda data: data["threads"][0].update(state="merge"), "'merge' is none of"),
        (lambda data: data["threads"][0].update(number=0), "0 is less than 1"),
        (lambda data: data["threads"][0].update(merge_commit="abc"), "does not fit pattern"),
        (lambda data: data["threads"][0].update(checked=None), "checked: None is no string"),
        (lambda data: data["threads"][0].update(checked="2026-13-01"), "o/r#1: month must be in 1..12"),
        (lambda data: data["threads"].append(data["threads"][0]), "o/r#1 is there twice"),
    ],
    ids=["schema", "missing", "unknown", "word", "number", "commit", "never", "month", "twice"],
)
def test_a_file_that_is_not_as_it_should_be_is_named_with_the_place(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], wrong: str
) -> None:
    _edited(tmp_path, edit)

    with pytest.raises(UpkeepError, match=rf"threads\.json.*({wrong})"):
        threads.read(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe"], ids=["cut", "bytes"])
def test_a_file_that_is_no_json_says_how_to_get_it_back(tmp_path: Path, content: bytes) -> None:
    (tmp_path / threads.NAME).write_bytes(content)

    with pytest.raises(UpkeepError, match="git checkout"):
        threads.read(tmp_path)


@pytest.mark.parametrize(
    ("known", "sentence"),
    [
        (answer(), "open"),
        (answer(state="draft"), "draft"),
        (answer(state=None), "unknown"),
        (answer(state="closed", closed=date(2026, 6, 17)), "closed 2026-06-17"),
        (answer(state="closed", closed=date(2026, 6, 17), reason="not_planned"), "closed 2026-06-17, not planned"),
        (answer(state="closed"), "closed"),
        (merged(), "merged 2026-07-30 to main, in no release on 2026-08-01"),
        (merged(base="dev", releases_checked=None), "merged 2026-07-30 to dev"),
        (
            merged(base=None, released_in="v0.8.2", released=date(2026, 8, 18)),
            "merged 2026-07-30, in v0.8.2 (2026-08-18)",
        ),
        (merged(released_in="v1.0"), "merged 2026-07-30 to main, in v1.0"),
        (merged(prerelease="v1.0rc1"), "merged 2026-07-30 to main, only in the pre-release v1.0rc1"),
        (answer(moved_to="p/q#2"), "open, moved to p/q#2"),
    ],
)
def test_a_state_is_one_sentence(known: Answer, sentence: str) -> None:
    assert known.sentence() == sentence


@pytest.mark.parametrize(
    ("known", "final"),
    [
        (merged(released_in="v1.0"), True),
        (merged(released_in="v1.0", source="stored copy"), False),
        (merged(), False),
        (merged(prerelease="v1.0rc1"), False),
        (answer(state="closed"), False),
    ],
)
def test_only_a_thread_that_the_host_calls_released_is_final(known: Answer, final: bool) -> None:
    assert known.final is final


def test_every_thread_of_this_repository_has_a_saved_answer() -> None:
    saved = threads.read(ROOT / "packs")

    missing = [str(each) for each in waiting.listed(registry.load(), ROOT / "packs") if each.key not in saved]

    assert missing == []


def test_every_saved_answer_of_this_repository_is_of_a_thread_that_a_declaration_names() -> None:
    named = {each.key for each in waiting.listed(registry.load(), ROOT / "packs")}
    named |= {(thread.repository, thread.number) for each in retired.read() for thread in each.threads}

    assert sorted(threads.read(ROOT / "packs").keys() - named) == []


def test_the_saved_answers_of_this_repository_fit_the_schema_and_are_in_order(tmp_path: Path) -> None:
    text = (ROOT / "packs" / threads.NAME).read_text()
    threads.write(tmp_path, threads.read(ROOT / "packs").values())

    jsonschema.validate(json.loads(text), RULES)
    assert (tmp_path / threads.NAME).read_text() == text


def test_a_saved_merge_of_this_repository_has_its_commit_and_a_release_has_a_merge() -> None:
    for each in threads.read(ROOT / "packs").values():
        assert each.state == "merged" or (each.merged is None and each.released_in is None), each
        assert each.merged is None or (each.merge_commit and each.base and each.releases_checked), each
        assert each.released is None or (each.merged and each.released >= each.merged), each


def test_every_thread_of_this_repository_whose_state_is_known_is_declared_in_one_word() -> None:
    undeclared = [each.key for each in threads.read(ROOT / "packs").values() if each.state and not each.declared]

    assert undeclared == []


CLOSED = answer(state="closed", closed=date(2026, 6, 17))
RELEASED = merged(released_in="v0.8.2", released=date(2026, 8, 18), checked=date(2026, 8, 20))


@pytest.mark.parametrize(
    ("declared", "known", "wrong"),
    [
        ("open", RELEASED, "is merged 2026-07-30 to main, in v0.8.2 (2026-08-18)"),
        ("draft", answer(), "is open"),
        ("open", CLOSED, "is closed 2026-06-17"),
        ("closed", answer(), "is open"),
        ("closed", merged(), "is merged 2026-07-30 to main, in no release on 2026-08-01"),
        ("merged", CLOSED, "is closed 2026-06-17"),
        ("merged", RELEASED, "is in v0.8.2"),
        ("released", merged(), "is in no release on 2026-08-01"),
        ("released", answer(), "is open"),
        ("open", answer(), None),
        ("open", answer(state="draft"), None),
        ("draft", answer(state="draft"), None),
        ("closed", CLOSED, None),
        ("merged", merged(), None),
        ("released", RELEASED, None),
        ("released", merged(releases_checked=None), None),
        ("released", merged(prerelease="v0.8.2rc1"), None),
        ("merged", answer(state=None), None),
        (None, RELEASED, None),
    ],
)
def test_only_a_wrong_declaration_is_a_contradiction(declared: str | None, known: Answer, wrong: str | None) -> None:
    assert replace(known, declared=declared).contradiction() == wrong


def test_answers_that_were_saved_without_a_declaration_are_read(tmp_path: Path) -> None:
    entry = threads.to_json(answer())
    del entry["declared"]
    (tmp_path / threads.NAME).write_text(json.dumps({"schema": 1, "threads": [entry]}))

    assert list(threads.read(tmp_path).values()) == [answer()]
