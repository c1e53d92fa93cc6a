"""`megacpp-overlays pack approve`: a person at a terminal types the words, or nothing is recorded."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_packs import Packs, searched, thread, today
from places import HANG_S, ROOT

from megacpp_overlays import cli
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.upkeep.filing import approvals
from megacpp_overlays.upkeep.filing.approvals import Approval

pytestmark = pytest.mark.usefixtures("one_day")

COMMAND = [sys.executable, "-m", "megacpp_overlays", "pack", "approve", "99", "--packs"]
END = "\x04"
"""The character that a terminal turns into an end of input."""
INTERRUPT = "an interrupt"
QUESTIONS = ("to record that it may be: ", "as it shall be recorded: ")


@pytest.fixture
def packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packs:
    """A folder with one pack that is ready."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MEGACPP_OVERLAYS_LOG", "logging")
    made = Packs(tmp_path / "packs")
    made.ready(more=searched())
    made.synchronise()
    return made


def recorded(packs: Packs) -> list[Approval]:
    return list(approvals.read(packs.folder))


def at_a_terminal(packs: Packs, *typed: str) -> tuple[int, str]:
    """Run the command at a real terminal, type an answer to each question, and return its exit code and its screen."""
    ours, terminal = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, str(packs.folder)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        # A background job of a shell ignores SIGINT, and its child processes inherit that.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    )
    os.close(terminal)
    screen, questions = "", iter(QUESTIONS)
    for answer in typed:
        screen += read_until(ours, next(questions))
        if answer == INTERRUPT:
            interrupt(process, ours)
        else:
            os.write(ours, answer.encode() if answer == END else f"{answer}\n".encode())
    screen += read_until(ours, None)
    os.close(ours)
    return process.wait(HANG_S), screen


def interrupt(process: subprocess.Popen[bytes], terminal: int) -> None:
    """Send SIGINT until the process prints; between the question and the wait for an answer it ignores the signal.

    Not until the process ends, which a busy host delays: another signal on its way out would kill it.
    """
    for _ in range(100):
        process.send_signal(signal.SIGINT)
        printed, _, _ = select.select([terminal], [], [], 0.2)
        if printed:
            return


def read_until(terminal: int, question: str | None) -> str:
    """Return what is on the screen up to a question, or up to the end of the process."""
    text = b""
    with contextlib.suppress(OSError):  # the process has ended
        while question is None or not text.endswith(question.encode()):
            text += os.read(terminal, 1)
    assert question is None or text.endswith(question.encode()), text.decode()
    return text.decode()


def test_the_words_and_a_name_at_a_terminal_are_recorded(packs: Packs) -> None:
    code, screen = at_a_terminal(packs, "post pack 99", "  A   Person ")

    assert code == 0, screen
    (given,) = recorded(packs)
    assert (given.number, given.date, given.name, given.words) == (99, str(today()), "A Person", "post pack 99")
    assert given.filing == "new issue in made/up"
    assert approvals.check(packs.folder, packs.standing()).reason == f"on {today()}, by A Person"
    assert "next: megacpp-overlays pack check 99" in screen


def test_what_would_be_sent_and_where_is_shown_before_the_words_are_asked_for(packs: Packs) -> None:
    _, screen = at_a_terminal(packs, "no")

    before = screen.partition("Nothing is posted by this command.")[0]
    (given,) = [line for line in before.splitlines() if line.startswith("pack 99")]
    assert given == "pack 99: doubles"
    assert "new issue in made/up" in before
    for name, content in approvals.filing.contents(packs.standing().pack).items():
        assert f"{content[:16]}  {name}" in before


@pytest.mark.parametrize(
    "typed",
    [
        pytest.param(
            each, marks=() if each in [("post pack 98",), ("post pack 99", "  "), (END,)] else pytest.mark.full
        )
        for each in [
            *[("yes",), ("post pack 98",), ("POST PACK 99",), ("",)],
            *[("post pack 99", ""), ("post pack 99", "  "), (END,)],
        ]
    ],
    ids=["yes", "another pack", "shouted", "nothing", "no name", "blank name", "end of input"],
)
def test_other_words_or_no_name_record_nothing(packs: Packs, typed: tuple[str, ...]) -> None:
    code, screen = at_a_terminal(packs, *typed)

    assert code == ExitCode.NOT_CHECKED
    assert "nothing is recorded" in screen
    assert recorded(packs) == []


def test_an_interrupt_records_nothing(packs: Packs) -> None:
    code, screen = at_a_terminal(packs, "post pack 99", INTERRUPT)

    assert (code, recorded(packs)) == (ExitCode.NOT_CHECKED, [])
    assert "no answer: nothing is recorded" in screen


def test_without_a_terminal_it_is_refused_whatever_is_piped_in(packs: Packs) -> None:
    done = subprocess.run(
        [*COMMAND, str(packs.folder)], input="post pack 99\nA Person\n", capture_output=True, text=True, check=False
    )

    assert done.returncode == ExitCode.NOT_CHECKED
    assert "an approval needs a person at a terminal" in done.stderr
    assert recorded(packs) == []


@pytest.mark.parametrize("option", ["--yes", "--force", "--name=me", "-y"])
def test_no_option_stands_for_a_person(packs: Packs, capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["pack", "approve", "99", "--packs", str(packs.folder), option])

    assert "unrecognized arguments" in capsys.readouterr().err


# What cannot be approved, and what an approval is


def approve(packs: Packs, *answers: str) -> Approval:
    left = iter(answers or ("post pack 99", "A Person"))
    return approvals.approve(packs.folder, packs.standing(), lambda _: None, lambda _: next(left))


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"upstream": "fixed"}, "fixed upstream: it is not filed"),
        ({"priority": "none"}, "its priority is none"),
        ({"kind": "held"}, "it is held"),
        ({"state": "filed"}, "its state is filed: it was sent"),
        ({"state": "draft"}, "its state is draft; it needs a kept receipt with BUG_REPRODUCED"),
        ({"state": "draft", "reproducer": None}, "its state is draft; it needs a reproduce.py"),
        ({"state": "ready"}, "it is not ready; it needs a claim that holds"),
    ],
)
def test_a_pack_that_is_not_to_be_sent_cannot_be_approved(tmp_path: Path, facts: dict[str, str], says: str) -> None:
    packs = Packs(tmp_path)
    packs.write(**{"kind": "bug report", **facts})  # type: ignore[arg-type]

    with pytest.raises(UpkeepError, match=f"pack 99 cannot be approved: {says}"):
        approve(packs)

    assert recorded(packs) == []


def test_an_overlap_without_an_open_thread_cannot_be_approved(tmp_path: Path) -> None:
    packs = Packs(tmp_path)
    packs.ready(upstream="overlap", more=thread(1))
    packs.answer(1, "closed")

    with pytest.raises(UpkeepError, match="none of its threads there is open"):
        approve(packs)


def test_earlier_approvals_are_kept_and_the_latest_of_this_content_counts(packs: Packs) -> None:
    notes = packs.folder / "99-double" / "README.md"
    approve(packs, "post pack 99", "First")
    text = notes.read_text()
    notes.write_text(text + "\nMore.\n")
    approve(packs, "post pack 99", "Second")

    assert [each.name for each in recorded(packs)] == ["First", "Second"]
    assert approvals.check(packs.folder, packs.standing()).reason == f"on {today()}, by Second"
    notes.write_text(text)
    assert approvals.check(packs.folder, packs.standing()).reason == f"on {today()}, by First"


def test_an_approval_is_of_the_content_that_was_shown_although_it_changes_while_a_person_types(packs: Packs) -> None:
    notes = packs.folder / "99-double" / "README.md"

    def answer(question: str) -> str:
        notes.write_text(notes.read_text() + "\nChanged meanwhile.\n")
        return "A Person" if "name" in question else "post pack 99"

    approvals.approve(packs.folder, packs.standing(), lambda _: None, answer)

    assert "but for other content" in approvals.check(packs.folder, packs.standing()).reason


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda data: data.update(schema=2), "has schema 2, and this version knows 1"),
        (lambda data: data.pop("approvals"), "is not what"),
        (lambda data: data["approvals"][0].pop("digest"), "is not what"),
        (lambda data: data["approvals"][0].update(words="sure"), "approval of pack 99 without its words or a name"),
        (lambda data: data["approvals"][0].update(name=" "), "approval of pack 99 without its words or a name"),
        (lambda data: data["approvals"][0].update(number=98), "approval of pack 98 without its words"),
    ],
    ids=["schema", "no approvals", "no digest", "words", "name", "number"],
)
def test_a_file_that_the_command_cannot_have_written_is_refused(packs: Packs, edit: object, says: str) -> None:
    approve(packs)
    path = packs.folder / approvals.NAME
    data = json.loads(path.read_text())
    edit(data)  # type: ignore[operator]
    path.write_text(json.dumps(data))

    with pytest.raises(UpkeepError, match=says):
        approvals.read(packs.folder)


def test_a_file_that_is_no_json_is_refused(packs: Packs) -> None:
    (packs.folder / approvals.NAME).write_text("{")

    with pytest.raises(UpkeepError, match=r"approvals\.json is not what `megacpp-overlays pack approve` writes"):
        approvals.read(packs.folder)
