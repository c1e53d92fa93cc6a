"""`pack.toml`: every field is validated, and a typo is an error that names its place."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megacpp_overlays.model import Target, Thread
from megacpp_overlays.repro import pack_file
from megacpp_overlays.repro.case import PackError
from megacpp_overlays.repro.pack_file import PackFile

GOOD = """\
repository = "made/up"
upstream = "new"
priority = "crash"
files = ["src/layers.py"]
"""
TARGET = '[[targets]]\ndistribution = "made"\nmodule = "made.layers"\nsymbol = "double"\n'
THREAD = '[[threads]]\nrepository = "made/up"\nnumber = 7\nstate = "open"\n'


def read(tmp_path: Path, text: str) -> PackFile:
    folder = tmp_path / "99-double"
    folder.mkdir(exist_ok=True)
    (folder / pack_file.NAME).write_text(text)
    return pack_file.read(folder)


def test_four_fields_are_enough(tmp_path: Path) -> None:
    assert read(tmp_path, GOOD) == PackFile(
        repository="made/up", upstream="new", priority="crash", files=("src/layers.py",)
    )


def test_everything_that_can_be_said_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, f"{GOOD}searched = 2026-11-20\n{TARGET}{THREAD}")

    assert found.searched == datetime.date(2026, 11, 20)
    assert found.targets == (Target("made", "made.layers", "double"),)
    assert found.threads == (Thread("made/up", 7, "open"),)


WRONG = {
    "no TOML": ("repository = ", "is no TOML"),
    "missing": (GOOD.replace('priority = "crash"\n', ""), "priority is missing"),
    "unknown": (GOOD + "urgency = 1\n", "urgency is not known"),
    "unknown in a table": (GOOD + THREAD + "url = 1\n", r"threads\[0\]: url is not known"),
    "no repository": (GOOD.replace("made/up", "made"), "repository = 'made' is not valid"),
    "empty": (GOOD.replace("made/up", ""), "repository = '' is not valid"),
    "upstream": (GOOD.replace("new", "open"), "upstream = 'open' is none of new, overlap, fixed, declined"),
    "priority": (
        GOOD.replace("crash", "high"),
        "priority = 'high' is none of crash, piggyback, refactor, report, none",
    ),
    "files": (GOOD.replace("[", "").replace("]", ""), "files is no list of texts"),
    "a file without a name": (GOOD.replace("src/layers.py", ""), "files is no list of texts"),
    "day as text": (GOOD + 'searched = "2026-11-20"\n', "searched = '2026-11-20' is no day"),
    "day with a time": (GOOD + "searched = 2026-11-20T10:00:00\n", "is no day such as 2026-11-20"),
    "thread of text": (GOOD + THREAD.replace("7", '"7"'), "number = '7' is no number of a thread"),
    "thread zero": (GOOD + THREAD.replace("7", "0"), "number = 0 is no number of a thread"),
    "thread true": (GOOD + THREAD.replace("7", "true"), "number = True is no number of a thread"),
    "one table": (GOOD + THREAD.replace("[[", "[").replace("]]", "]"), "threads is no list of tables"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_is_reported_with_the_pack_and_the_field(tmp_path: Path, case: str) -> None:
    text, says = WRONG[case]

    with pytest.raises(PackError, match=rf"99-double/pack\.toml.*{says}"):
        read(tmp_path, text)


def test_a_pack_without_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"pack\.toml: there is no such file; it names the repository"):
        pack_file.read(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(position=st.integers(0, len(GOOD) - 1), letter=st.sampled_from("x\"'[]=#1 \n"))
def test_no_text_ends_in_anything_but_facts_or_our_error(tmp_path: Path, position: int, letter: str) -> None:
    try:
        found = read(tmp_path, GOOD[:position] + letter + GOOD[position + 1 :])
    except PackError:
        return
    assert found.upstream in pack_file.UPSTREAM
    assert found.priority in pack_file.PRIORITIES
    assert found.repository.count("/") == 1
