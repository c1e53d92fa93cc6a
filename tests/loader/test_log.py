"""Decision lines: one each, on the right ranks, in the form that was asked for."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up import BROKEN_TEXT, FIXED_TEXT, Upstream

from megacpp_overlays.errors import SettingsError
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import LogForm

SessionMaker = Callable[..., Session]
UNKNOWN_TEXT = BROKEN_TEXT.replace("x + x + 1", "2 * x + 1")


def settle(session: SessionMaker, upstream: Upstream, **settings: object) -> None:
    session(upstream.overlay(), **settings).arm()
    upstream.load()


def test_rank_0_prints_on_stderr_though_nobody_configured_logging(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    settle(session, upstream)

    out, err = capsys.readouterr()
    assert out == ""
    armed, active = err.splitlines()
    assert armed == "[megacpp_overlays] mode auto; armed: double-fix"
    for word in (
        "active: double-fix (pack 99)",
        "return x + x + 1 (layers.py:7)",
        f"replaced {upstream.module_name}.double",
        "without it: every double is one too large",
        "delete when upstream doubles without adding one",
        "off: MEGACPP_OVERLAY_DOUBLE_FIX=off",
    ):
        assert word in active


@pytest.mark.parametrize(("text", "printed"), [(BROKEN_TEXT, False), (FIXED_TEXT, False), (UNKNOWN_TEXT, True)])
def test_other_ranks_print_only_conflicts(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str], text: str, printed: bool
) -> None:
    upstream.write(text)

    settle(session, upstream, rank=3)

    err = capsys.readouterr().err
    assert bool(err) is printed
    if printed:
        assert err.startswith("[megacpp_overlays rank 3] conflict: double-fix")
        assert "nothing is installed; if upstream is still broken, every double is one too large" in err


@pytest.mark.parametrize(("text", "harm"), [(BROKEN_TEXT, True), (FIXED_TEXT, False)])
def test_a_fix_that_is_off_is_called_harmful_only_where_upstream_is_broken(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str], text: str, harm: bool
) -> None:
    upstream.write(text)

    settle(session, upstream, disabled=frozenset({"double-fix"}))

    assert ("nothing is installed, so every double is one too large" in capsys.readouterr().err) is harm


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
    assert [(entry.name, entry.levelname) for entry in caplog.records] == [
        ("megacpp_overlays", "INFO"),
        ("megacpp_overlays", "WARNING"),
    ]


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

    first, _, last = path.read_text().splitlines()
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
    with pytest.raises(SettingsError, match=r"fifo cannot be written: No such device"):  # and nobody waits for a reader
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


def test_what_is_off_is_said_at_import(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    session(upstream.overlay(), disabled=frozenset({"double-fix"})).arm()

    assert capsys.readouterr().err.rstrip(os.linesep) == "[megacpp_overlays] mode auto; off: double-fix"
