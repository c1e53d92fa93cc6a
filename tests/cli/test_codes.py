"""Exit codes and help: one table of codes for all commands. The help of each command lists its codes and examples of calls."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from megacpp_overlays import cli
from megacpp_overlays.cli import codes, commands
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.errors import (
    ActivationError,
    CheckpointError,
    LockError,
    MissingExtraError,
    OverlayError,
    SettingsError,
    UpkeepError,
)

PARSER, COMMANDS = cli.parsers()
NAMES = list(COMMANDS.choices)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsError, 2),
        (ActivationError, 1),
        (MissingExtraError, 6),
        (UpkeepError, 5),
        (LockError, 5),
        (CheckpointError, 5),
        (OverlayError, 5),
    ],
)
def test_an_error_has_the_code_of_its_cause(error: type[OverlayError], code: int) -> None:
    assert codes.of(error("x")) == code


def test_each_code_has_one_meaning() -> None:
    assert list(codes.MEANINGS) == list(ExitCode)
    assert len(set(codes.MEANINGS.values())) == len(ExitCode)


@pytest.mark.parametrize("name", NAMES)
def test_a_command_says_which_codes_it_gives_and_shows_how_it_is_called(name: str) -> None:
    text = COMMANDS.choices[name].format_help()

    examples, _, codes = text.partition("examples:")[2].partition("exit codes:")
    given = re.findall(r"^  (\d+)  ", codes, re.MULTILINE)
    assert given == sorted(given, key=int)
    assert {"0", "2"} <= set(given) <= {str(code.value) for code in ExitCode}
    lines = [line for line in examples.splitlines() if line.strip()]
    assert lines
    for line in lines:
        words = shlex.split(line, comments=True)
        assert words[:2] == ["megacpp-overlays", name]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "run"])
def test_examples_are_accepted_by_the_parser(name: str) -> None:
    for line in COMMANDS.choices[name].format_help().partition("examples:")[2].partition("exit codes:")[0].splitlines():
        words = shlex.split(line, comments=True)[1:]
        if words:
            PARSER.parse_args(words[: words.index(">")] if ">" in words else words)


def test_help_lists_commands_by_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])

    out = capsys.readouterr().out
    run, _, lane = out.partition("for a run:")[2].partition("for keeping a lane:")
    assert re.findall(r"^  (\S+)", run, re.MULTILINE)[:5] == ["audit", "explain", "symptom", "info", "run"]
    assert all(f"\n  {name} " in run or f"\n  {name} " in lane for name in NAMES)
    assert max(map(len, lane.partition("examples:")[0].splitlines())) < 80


def test_a_missing_extra_has_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)

    assert cli.main(["completion", "bash"]) == ExitCode.MISSING_EXTRA
    advice = capsys.readouterr().err
    assert "this command needs shtab, of the extra `upkeep`: pip install '" in advice
    assert all(f"'{requirement}'" in advice for requirement in commands.EXTRA.values() if "tomli" not in requirement)
    assert "in a clone pip install '.[upkeep]'" in advice
    assert "megacpp-overlays[" not in advice


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_a_shell_completes_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")

    assert cli.main(["completion", shell]) == ExitCode.CLEAN

    out = capsys.readouterr().out
    assert all(name in out for name in NAMES)
    assert shell == "tcsh" or "--require" in out  # which knows options of commands not at all


def test_bash_takes_the_completion_and_offers_matching_words(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    cli.main(["completion", "bash"])
    script = capsys.readouterr().out
    ask = 'COMP_WORDS=(megacpp-overlays che); COMP_CWORD=1; _shtab_megacpp_overlays; printf "%s\\n" "${COMPREPLY[@]}"'

    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=False)

    assert done.stdout.split() == ["checkpoint"]
