"""Four questions of a new user: the kept page is of its receipts, each was answered in its time, and a wrong answer is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from places import ROOT

RESULTS = ROOT / "proof" / "results"


@pytest.fixture
def receipts() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "new-user.json").read_text())
    return found


@pytest.fixture
def judged() -> Callable[..., list[str]]:
    """Return the problems of an answer that is right except for the given changes."""

    def problems(**changed: Any) -> list[str]:
        from new_user import Command, Question, problems

        asked = Question("Is it so?", 1, "README", (Command("ask", ("yes",), code=3),))
        return list(problems(asked, {"answers": [{"printed": "so it\nis, yes", "code": 3, "seconds": 2.0, **changed}]}))

    return problems


def test_the_page_is_made_of_the_receipts(receipts: dict[str, Any]) -> None:
    from new_user import page

    assert (RESULTS / "new-user.md").read_text() == page(receipts)


def test_every_question_of_today_was_answered_in_its_time(receipts: dict[str, Any]) -> None:
    from new_user import QUESTIONS, problems

    assert [each["asked"] for each in receipts["questions"]] == [each.asked for each in QUESTIONS]
    for question, found in zip(QUESTIONS, receipts["questions"], strict=True):
        assert [each["line"] for each in found["answers"]] == [each.line for each in question.commands]
        assert list(problems(question, found)) == []


def test_no_folder_of_the_host_is_in_it(receipts: dict[str, Any]) -> None:
    assert "/tmp/" not in json.dumps(receipts)


def test_a_right_answer_is_no_problem(judged: Callable[..., list[str]]) -> None:
    assert judged() == []


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"code": 0}, "ended with 0, not 3"),
        ({"printed": "perhaps"}, "does not say 'yes'"),
        ({"seconds": 61.0}, "took 61 s"),
    ],
)
def test_a_wrong_answer_is_named(changed: dict[str, Any], says: str, judged: Callable[..., list[str]]) -> None:
    (problem,) = judged(**changed)

    assert says in problem


def test_a_long_output_is_cut_in_its_middle() -> None:
    from new_user import QUESTIONS, page

    answer = {"line": "ask", "printed": "\n".join(map(str, range(100))), "code": 0, "seconds": 1.0}
    asked = [{"asked": each.asked, "answers": [answer]} for each in QUESTIONS]
    made = page({"lock": "a.txt", "machine": "one", "questions": asked})

    assert "\n[52 lines]\n" in made
    assert "\n99\n" in made
    assert "\n50\n" not in made
