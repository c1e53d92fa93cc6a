"""Decision lines: one each, on the right ranks, in the form that was asked for."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import text
from launchers import environment, launch, write
from made_up import BROKEN_TEXT, FIXED_TEXT, Upstream

from megacpp_overlays.errors import SettingsError
from megacpp_overlays.loader import lines, log, registry
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import SAID, LogForm, LogLevel, Mode, Settings
from megacpp_overlays.model import Overlay
from megacpp_overlays.version import VERSION

SessionMaker = Callable[..., Session]
OVERLAYS = list({each.id: each for each in registry.load() if isinstance(each, Overlay)}.values())
UNKNOWN_TEXT = BROKEN_TEXT.replace("x + x + 1", "2 * x + 1")


def settle(session: SessionMaker, upstream: Upstream, **settings: object) -> None:
    session(upstream.overlay(), **settings).arm()
    upstream.load()


def test_an_active_overlay_has_one_line_with_its_repair_and_its_end(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    session(upstream.overlay(brief="doubles", until="upstream doubles right")).arm()
    upstream.load()

    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "[megacpp_overlays] active: double-fix (pack 99) repairs doubles; delete when upstream doubles right"
    ]


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda each: each.id)
def test_every_line_of_an_active_overlay_fits_and_says_when_it_goes(overlay: Overlay) -> None:
    line = lines.HEAD + lines.active(overlay)

    assert len(line) <= lines.LONGEST
    assert overlay.brief
    assert overlay.until
    assert line.endswith(f"repairs {overlay.brief}; delete when {overlay.until}")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(title=text(min_size=1, max_size=300), retire_when=text(min_size=1, max_size=300))
def test_a_plugin_that_has_not_said_it_in_brief_has_a_line_that_fits(
    upstream: Upstream, title: str, retire_when: str
) -> None:
    line = lines.active(upstream.overlay(title=title, retire_when=retire_when))

    assert len(lines.HEAD + line) <= lines.LONGEST
    assert "; delete when " in line


def test_a_decision_that_needs_no_person_has_no_line(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream.write(FIXED_TEXT)

    settle(session, upstream)

    assert capsys.readouterr().err == ""


def test_details_are_logged_at_their_level(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    settle(session, upstream, log_level=LogLevel.DEBUG)

    armed, active = capsys.readouterr().err.splitlines()
    assert armed == "[megacpp_overlays] mode auto; armed: double-fix"
    for word in (
        "active: double-fix (pack 99)",
        "return x + x + 1 (layers.py:7)",
        f"replaced in {upstream.module_name}: double",
        "without it: every double is one too large",
        "delete when upstream doubles without adding one",
        "off: MEGACPP_OVERLAY_DOUBLE_FIX=off",
    ):
        assert word in active


@pytest.mark.parametrize(("code", "words"), [(BROKEN_TEXT, []), (UNKNOWN_TEXT, ["WARNING conflict"])])
def test_the_quiet_level_has_warnings_alone(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str], code: str, words: list[str]
) -> None:
    upstream.write(code)

    settle(session, upstream, log_level=LogLevel.WARNING)

    assert [each.partition(": ")[0].partition("] ")[2] for each in capsys.readouterr().err.splitlines()] == words


def test_a_warning_cannot_be_taken_for_good_news_and_gives_advice(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream.write(UNKNOWN_TEXT)

    settle(session, upstream)

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"[megacpp_overlays] WARNING conflict: double-fix (pack 99) on {upstream.module_name}")
    assert "nothing is installed; if upstream is still broken, every double is one too large" in line
    assert "| what to do: megacpp-overlays audit double-fix | off: MEGACPP_OVERLAY_DOUBLE_FIX=off" in line


# Children


@pytest.fixture
def process(upstream: Upstream) -> Iterator[Callable[[dict[str, str]], Session]]:
    """Make the session of a process that was started with an environment, and that may start others."""
    made: list[Session] = []

    def start(environment: dict[str, str]) -> Session:
        made.append(Session([upstream.overlay()], Settings.from_env(environment, ["double-fix"]), environment))
        made[-1].arm()
        return made[-1]

    yield start
    for each in made:
        each._hooks.close()
        each.undo()


def test_a_child_prints_only_lines_that_its_parent_did_not(
    upstream: Upstream, process: Callable[[dict[str, str]], Session], capsys: pytest.CaptureFixture[str]
) -> None:
    environment: dict[str, str] = {}
    parent = process(environment)
    upstream.load()
    parent._hooks.close()
    parent.undo()
    assert "active: double-fix" in capsys.readouterr().err
    assert re.fullmatch("[0-9a-f]{8}", environment[SAID])

    del sys.modules[upstream.module_name]
    alike = process(environment)
    upstream.load()
    alike.log.count(alike.audit())
    alike._hooks.close()
    alike.undo()
    assert capsys.readouterr().err == ""

    del sys.modules[upstream.module_name]
    upstream.write(UNKNOWN_TEXT)
    other = process(environment)
    upstream.load()
    other.log.count(other.audit())
    warning, count = capsys.readouterr().err.splitlines()
    assert "WARNING conflict: double-fix" in warning
    assert "0 active, 0 retired, 1 conflict" in count


# The count


def test_one_line_counts_the_decisions_and_names_those_that_need_a_person(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream.write(UNKNOWN_TEXT)
    armed = session(upstream.overlay())
    armed.arm()
    upstream.load()
    audit = armed.audit()
    capsys.readouterr()

    armed.log.count(audit)
    armed.log.count(audit)

    assert capsys.readouterr().err == (
        f"[megacpp_overlays] {VERSION}: 0 active, 0 retired, 1 conflict (fingerprint {audit.fingerprint}); "
        "look at double-fix: megacpp-overlays audit\n"
    )


LAUNCHER = """
import os, sys
import megacpp_overlays
__import__(f"{os.environ['NAME']}.layers")
if "audit" in sys.argv:
    megacpp_overlays.audit()
print("trains", file=sys.stderr)
"""


WITHOUT_GATES = pytest.mark.skipif(
    find_spec("mamba_ssm") is not None, reason="a gate speaks where mamba-ssm is installed"
)


@WITHOUT_GATES
@pytest.mark.parametrize(
    ("words", "order"),
    [(["audit"], ["active", "count", "trains", "never called"]), ([], ["active", "trains", "count"])],
)
def test_a_launcher_gets_each_line_once_at_its_first_audit_or_at_its_end(
    upstream: Upstream, words: list[str], order: list[str]
) -> None:
    done = launch(write(upstream, LAUNCHER), *words, env=environment(upstream))

    assert done.returncode == 0, done.stderr
    never = "[megacpp_overlays] active and never called: double-fix"
    names = {"active: double-fix": "active", "1 active, 0 retired, 0 conflict": "count", "trains": "trains"}
    names[never] = "never called"
    reported = [name for line in done.stderr.splitlines() for word, name in names.items() if word in line]
    assert reported == order
    assert len(done.stderr.splitlines()) == len(order)
    assert done.stderr.endswith("active and never called: double-fix\n")


@WITHOUT_GATES
def test_a_process_that_imports_no_target_says_nothing(upstream: Upstream) -> None:
    done = launch(write(upstream, "import megacpp_overlays"), env=environment(upstream))

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("text", "printed"), [(BROKEN_TEXT, False), (FIXED_TEXT, False), (UNKNOWN_TEXT, True)])
def test_other_ranks_print_only_conflicts(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str], text: str, printed: bool
) -> None:
    upstream.write(text)

    settle(session, upstream, rank=3)

    err = capsys.readouterr().err
    assert bool(err) is printed
    if printed:
        assert err.startswith("[megacpp_overlays rank 3] WARNING conflict: double-fix")
        assert "nothing is installed; if upstream is still broken, every double is one too large" in err


@pytest.mark.parametrize(("text", "harm"), [(BROKEN_TEXT, True), (FIXED_TEXT, False)])
def test_a_fix_that_is_off_is_called_harmful_only_where_upstream_is_broken(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str], text: str, harm: bool
) -> None:
    upstream.write(text)

    settle(session, upstream, disabled=frozenset({"double-fix"}))

    assert ("so every double is one too large" in capsys.readouterr().err) is harm


def test_the_logging_form_goes_to_the_standard_logger_alone(
    upstream: Upstream,
    session: SessionMaker,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    upstream.write(UNKNOWN_TEXT)
    caplog.set_level(logging.INFO, logger="megacpp_overlays")

    settle(session, upstream, log=LogForm.LOGGING)

    assert capsys.readouterr().err == ""
    assert [(entry.name, entry.levelname) for entry in caplog.records] == [("megacpp_overlays", "WARNING")]


def test_a_logger_that_wants_details_gets_them_with_the_short_line(
    upstream: Upstream, session: SessionMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="megacpp_overlays")

    settle(session, upstream, log=LogForm.LOGGING)

    assert [entry.levelname for entry in caplog.records] == ["DEBUG", "DEBUG", "INFO"]
    assert caplog.messages[0] == "mode auto; armed: double-fix"
    assert "replaced" in caplog.messages[1]
    assert "replaced" not in caplog.messages[2]


def test_the_json_form_is_one_object_a_line(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    settle(session, upstream, log=LogForm.JSON)

    armed, decision = map(json.loads, capsys.readouterr().err.splitlines())
    assert armed == {"event": "armed", "armed": ["double-fix"], "off": [], "rank": 0}
    assert (decision["event"], decision["id"], decision["decision"]) == ("decision", "double-fix", "active")


@pytest.mark.parametrize("name", ["overlays.log", "overlays.jsonl"])
def test_a_path_is_appended_to_and_its_ending_chooses_the_form(
    upstream: Upstream, session: SessionMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / name
    path.write_text("kept\n")

    settle(session, upstream, log=LogForm.FILE, log_path=str(path))

    first, *_, last = path.read_text().splitlines()
    assert first == "kept"
    assert capsys.readouterr().err == ""
    if name.endswith(".jsonl"):
        assert json.loads(last)["decision"] == "active"
    else:
        assert last.startswith("[megacpp_overlays] active: double-fix")


def test_a_path_that_cannot_be_written_is_refused_at_once(
    upstream: Upstream, session: SessionMaker, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SettingsError, match=r"fifo cannot be written: No such device"):  # without waiting for a reader
        session(upstream.overlay(), log=LogForm.FILE, log_path=str(tmp_path / "fifo"))
    with pytest.raises(SettingsError, match=r"no/such/log cannot be written: No such file"):
        session(upstream.overlay(), log=LogForm.FILE, log_path=str(tmp_path / "no/such/log"))


def test_a_log_file_that_cannot_be_written_any_more_does_not_stop_the_import(
    upstream: Upstream, session: SessionMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    session(upstream.overlay(), log=LogForm.FILE, log_path=str(folder / "overlays.log")).arm()
    shutil.rmtree(folder)

    assert upstream.load().double(1) == 2
    err = capsys.readouterr().err
    assert "active: double-fix" in err
    assert "MEGACPP_OVERLAYS_LOG does not work: FileNotFoundError" in err


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "none"])
def test_a_process_without_stderr_goes_on(
    upstream: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr("sys.stderr", stream if closed else None)

    settle(session, upstream)

    assert upstream.load().double(1) == 2


def test_a_package_that_is_off_says_so_in_one_short_line(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    session(*(upstream.overlay(id=f"fix-{number}", pack=number) for number in range(40)), mode=Mode.OFF).arm()

    assert capsys.readouterr().err == "[megacpp_overlays] mode off; nothing is installed\n"


def test_a_python_that_is_newer_than_those_of_the_tests_is_reported_once_on_one_rank(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ".".join(map(str, sys.version_info[:2]))
    session(upstream.overlay()).arm()
    assert capsys.readouterr().err == ""

    monkeypatch.setattr(log, "NEWEST_PYTHON", (3, 9))
    for changed in ({"rank": 1}, {"parent_is_armed": True}, {"mode": Mode.OFF}, {}):
        made = session(upstream.overlay(), **changed)
        made.arm()
        made.arm()

    reported = [line for line in capsys.readouterr().err.splitlines() if "is tested on" in line]
    assert reported == [
        f"[megacpp_overlays] Python {here} is newer than 3.9, the newest that this package is tested on; if a probe does "
        "not recognise its syntax, that is a conflict, and nothing is installed"
    ]


def test_overlays_that_are_off_are_logged_at_import(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    session(upstream.overlay(), disabled=frozenset({"double-fix"})).arm()

    assert capsys.readouterr().err.rstrip(os.linesep) == "[megacpp_overlays] mode auto; off: double-fix"
