"""The command line: exit code 0 for clean, 1 for a conflict, 2 for wrong usage."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up import BROKEN_TEXT, FIXED_TEXT, Upstream
from places import ROOT

from megacpp_overlays import cli
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.loader import session as sessions
from megacpp_overlays.loader.session import Session
from megacpp_overlays.model import Target

SessionMaker = Callable[..., Session]


@pytest.fixture
def current(upstream: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch) -> Session:
    made = session(upstream.overlay())
    made.arm()
    monkeypatch.setattr(sessions, "current", lambda: made)
    return made


@pytest.mark.usefixtures("current")
def test_audit_imports_the_installed_targets_and_exits_0_when_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit"]) == 0

    assert "active" in capsys.readouterr().out


@pytest.mark.usefixtures("current")
def test_audit_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["decisions"][0]["decision"] == "active"


@pytest.mark.usefixtures("current")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BROKEN_TEXT.replace("x + x + 1", "2 * x + 1"), "2 * x + 1"),
        ("raise OSError('libcuda.so.1: cannot open')\n", "cannot be imported here: OSError: libcuda"),
    ],
    ids=["unrecognised", "does not import"],
)
def test_audit_exits_1_on_a_conflict_and_on_a_target_it_cannot_vouch_for(
    upstream: Upstream, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    upstream.write(text)

    assert cli.main(["audit"]) == 1

    assert says in " ".join(capsys.readouterr().out.split())  # the table wraps its lines


def test_a_target_next_to_the_package_of_its_distribution_waits_where_another_package_is_missing(
    upstream: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream.write("import a_package_that_is_missing\n" + BROKEN_TEXT)
    target = Target(distribution=f"{upstream.name}-core", module=upstream.module_name, symbol="double")
    made = session(upstream.overlay(target=target))
    made.arm()
    monkeypatch.setattr(sessions, "current", lambda: made)

    assert cli.main(["audit", "--json"]) == 0

    (found,) = json.loads(capsys.readouterr().out)["decisions"]
    assert found["decision"] == "armed"
    assert found["reason"].endswith("cannot be imported here and waits: No module named 'a_package_that_is_missing'")


@pytest.mark.parametrize(
    ("asked", "decision"),
    [
        ('Requires-Dist: a-package-that-is-missing>=1; extra == "dev"', "armed"),
        ("Requires-Dist: a-package-that-is-missing>=1", "conflict"),
        (
            'Requires-Dist: a-package-that-is-missing>=1\nRequires-Dist: a-package-that-is-missing[all]; extra == "all"',
            "conflict",
        ),
        ('Requires-Dist: another-package; extra == "dev"', "conflict"),
        ("", "conflict"),
    ],
)
def test_a_target_waits_where_a_package_is_missing_that_its_distribution_asks_for_as_an_extra(
    upstream: Upstream,
    session: SessionMaker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: str,
    decision: str,
) -> None:
    upstream.write("import a_package_that_is_missing\n" + BROKEN_TEXT)
    described = upstream.folder / f"{upstream.name}-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {upstream.name}\nVersion: 1.0\n{asked}\n")
    made = session(upstream.overlay())
    made.arm()
    monkeypatch.setattr(sessions, "current", lambda: made)

    assert cli.main(["audit", "--json"]) == (decision == "conflict")

    (found,) = json.loads(capsys.readouterr().out)["decisions"]
    assert found["decision"] == decision


@pytest.mark.parametrize("arguments", [[], ["audti"], ["audit", "--jsn"], ["ledger", "--check"]])
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)

    assert caught.value.code == 2
    sentence, help_is_at = capsys.readouterr().err.splitlines()
    assert sentence.startswith("megacpp-overlays")
    assert help_is_at.endswith(" --help` has the options)")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["audti"], "there is no command audti; did you mean audit?"),
        (["led"], "there is no command led; did you mean ledger?"),
        (["audit", "--jsn"], "audit: error: unrecognized arguments: --jsn; did you mean --json?"),
        (["pack", "list", "--pakcs", "x"], "list: error: unrecognized arguments: --pakcs x; did you mean --packs?"),
        (["compare", "a", "b", "c"], "compare: error: unrecognized arguments: c\n"),
    ],
)
def test_the_nearest_name_to_a_misspelt_one_is_named(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)

    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_ledger_prints_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "RETIREMENT.md"

    assert cli.main(["ledger", "--write", str(path)]) == 0
    assert cli.main(["ledger", "--check", str(path)]) == 0
    path.write_text(path.read_text().replace("# Retirement ledger", "# Ledger"))
    assert cli.main(["ledger", "--check", str(path)]) == 1
    assert cli.main(["ledger", "--write", str(path)]) == 0
    capsys.readouterr()
    assert cli.main(["ledger"]) == 0

    assert capsys.readouterr().out.strip() == path.read_text().strip()


@pytest.mark.usefixtures("current")
@pytest.mark.parametrize(
    ("text", "code", "says"),
    [(BROKEN_TEXT, 0, "nothing is due here"), (FIXED_TEXT, 1, "double-fix: upstream doubles without adding one")],
    ids=["broken", "fixed"],
)
def test_ledger_lists_overlays_that_can_be_deleted_here(
    upstream: Upstream, capsys: pytest.CaptureFixture[str], text: str, code: int, says: str
) -> None:
    upstream.write(text)

    assert cli.main(["ledger", "--due"]) == code

    assert capsys.readouterr().out.strip() == says


def test_an_error_of_ours_is_one_line_and_has_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> bool:
        raise sessions.RegistryError("double-fix is declared twice")

    monkeypatch.setattr("megacpp_overlays.cli.audit.run", fail)

    assert cli.main(["audit"]) == ExitCode.NOT_CHECKED
    assert capsys.readouterr().err == "megacpp-overlays: double-fix is declared twice\n"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    import os

    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)


def test_the_module_form_works_and_a_wrong_setting_is_wrong_usage() -> None:
    assert run("-m", "megacpp_overlays", "--version").stdout.startswith("megacpp_overlays ")

    wrong = run("-m", "megacpp_overlays", "audit", MEGACPP_OVERLAYS="atuo")

    assert wrong.returncode == 2
    assert wrong.stderr == (
        "megacpp-overlays: MEGACPP_OVERLAYS=atuo is not known; did you mean auto? known: auto, observe, off, strict\n"
    )


@pytest.mark.parametrize(
    "command", [["--help"], ["--version"], ["audit", "--help"], ["ledger"], ["receipts", "--check"]]
)
def test_a_command_that_is_not_about_its_own_process_arms_nothing_in_it(command: list[str]) -> None:
    done = run("-W", "ignore", "-m", "megacpp_overlays", *command)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", [["--help"], ["--version"]])
def test_help_is_given_with_any_settings(command: list[str]) -> None:
    done = run("-m", "megacpp_overlays", *command, MEGACPP_OVERLAYS="atuo")

    assert (done.returncode, done.stderr) == (0, "")


def test_a_wrong_setting_in_a_launcher_raises_at_import() -> None:
    wrong = run("-c", "import megacpp_overlays", MEGACPP_OVERLAY_LIGER="off")

    assert wrong.returncode == 1
    assert "SettingsError: MEGACPP_OVERLAY_LIGER is no setting of megacpp_overlays" in wrong.stderr


@pytest.mark.parametrize("command", ["ledger", "receipts --check"])  # more than Python keeps back, and less
def test_a_reader_that_has_seen_enough_is_no_traceback_and_no_conflict(command: str) -> None:
    line = f'{shlex.quote(sys.executable)} -W ignore -m megacpp_overlays {command} | true; exit "${{PIPESTATUS[0]}}"'

    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, cwd="/")

    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "BrokenPipeError" not in done.stderr
