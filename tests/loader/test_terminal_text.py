"""Words of others are seen on a terminal and in a log, and do nothing there."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import Upstream

from megacpp_overlays import cli, terminal_text
from megacpp_overlays.cli import matrix as matrix_command
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.loader.session import Session
from megacpp_overlays.model import Finding
from megacpp_overlays.processes import differences, ranks
from megacpp_overlays.processes.differences import StatementGroup
from megacpp_overlays.processes.rank_exchange import Example, RanksVerdict
from megacpp_overlays.upkeep.drift.drift import DistributionDrift, DriftReport
from megacpp_overlays.upkeep.drift.drift_report import DriftOutcome
from megacpp_overlays.upkeep.drift.published import FileDifference
from megacpp_overlays.upkeep.drift.records import Kind
from megacpp_overlays.upkeep.matrix import matrix_text
from megacpp_overlays.upkeep.matrix.matrix import Row, Table

CLEARS = "\x1b[2J\x1b[Hforged\nno drift\r\x9b31m\u202e\udc80"
"""Escapes that clear the screen, line breaks, a one-character colour sequence, a change of direction and a lone surrogate."""


def is_plain(text: str) -> bool:
    return all(each.isprintable() or each == "\n" for each in text)


def test_unprintable_characters_are_escaped_and_the_rest_is_unchanged() -> None:
    assert terminal_text.one_line("Überschrift: 10 µs \N{SNOWMAN}") == "Überschrift: 10 µs \N{SNOWMAN}"
    assert terminal_text.one_line(CLEARS) == r"\x1b[2J\x1b[Hforged\nno drift\r\x9b31m\u202e\udc80"
    assert terminal_text.lines("a\tb\n\x1b") == "a\tb\n\\x1b"


def test_output_of_a_command_has_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stdout and on stderr."""

    def run(*_: object) -> bool:
        sys.stdout.write(CLEARS)
        raise UpkeepError(CLEARS)

    monkeypatch.setattr(matrix_command, "run", run)
    assert cli.main(["matrix"]) == ExitCode.NOT_CHECKED

    out, err = capsys.readouterr()
    assert "\\x1b[2J" in out
    assert "\\x1b[2J" in err
    assert is_plain(out)
    assert is_plain(err)


def test_a_stream_that_cannot_show_a_character_gets_it_escaped() -> None:
    inner = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    terminal_text.PlainStream(inner).writelines(["µs", "\n"])
    inner.seek(0)

    assert inner.read() == "\\xb5s\n"


def test_an_exception_of_several_lines_is_one_line_of_the_log(
    session: Callable[..., Session], upstream: Upstream, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(*_: object) -> Finding:
        raise ValueError("no\n[megacpp_overlays] active: everything is fine\x1b[2J")

    session(upstream.overlay(probe=raises)).arm()
    upstream.load()

    (conflict,) = capsys.readouterr().err.splitlines()
    assert conflict.startswith("[megacpp_overlays] WARNING conflict: double-fix")
    assert "\\n[megacpp_overlays] active: everything is fine\\x1b[2J" in conflict


def test_drift_cannot_have_its_findings_cleared() -> None:
    forged = FileDifference(file=f"torch/{CLEARS}.py", kind=Kind.ADDED, path=Path("x.py"))
    row = DistributionDrift(
        distribution="torch", version=f"2.9{CLEARS}", where="RECORD", checked=1, differences=(forged,), restore=CLEARS
    )
    report = DriftReport(rows=(row, replace(row, unchecked=(CLEARS,))), absent=(CLEARS,), quick=False)

    text = str(DriftOutcome(report=report, process=None))

    assert is_plain(text)
    assert "no drift" not in text.splitlines()


def test_a_yank_reason_stays_in_its_row() -> None:
    row = Row(name="1.0", date=None, dated=None, source="a.whl", sha256=None, yanked=CLEARS, cells={})
    table = Table(distribution="liger-kernel", asked="2026-11-22", columns=(), rows=(row,), trees=())

    text = matrix_text.render(table, evidence=False)

    assert is_plain(text)
    assert "no drift" not in text.splitlines()


def test_a_table_of_ranks_shows_text_of_a_rank_without_control_characters() -> None:
    said = [{"version": version, "decisions": []} for version in ("1", CLEARS)]
    found = differences.find([StatementGroup(each, (rank,)) for rank, each in enumerate(said)])
    verdict = RanksVerdict(2, 1, 4.0, ((0,), (1,)), (Example(1, CLEARS),), found, (), CLEARS)

    text = ranks.report(verdict)

    assert is_plain(text)
    assert not {"no drift", "forged"} & set(text.splitlines())
