"""`megacpp-overlays audit`: required decisions, comparison with a kept audit, wrong environments, one overlay, output forms."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launchers import environment, launch
from made_up import FIXED_TEXT, Upstream, gate_of

from megacpp_overlays import cli
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.loader import session as sessions
from megacpp_overlays.loader.audit import SCHEMA
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import Mode
from megacpp_overlays.model import Target

SessionMaker = Callable[..., Session]
UNKNOWN = "def double(x):\n    return 2 * x + 1\n"


@pytest.fixture
def arm(session: SessionMaker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Arm a session and make it the one of this process."""

    def make(*declared: Any, **settings: Any) -> None:
        made = session(*declared, **settings)
        made.arm()
        monkeypatch.setattr(sessions, "current", lambda: made)

    return make


@pytest.fixture
def kept(upstream: Upstream, tmp_path: Path) -> Callable[..., Path]:
    """Write a kept audit with decisions by id."""

    def write(**decisions: str) -> Path:
        rows = [
            {"id": name.replace("_", "-"), "target": f"{upstream.module_name}.double", "decision": decision}
            for name, decision in decisions.items()
        ]
        path = tmp_path / "kept.json"
        path.write_text(json.dumps({"schema": SCHEMA, "decisions": rows}))
        return path

    return write


# --require


@pytest.mark.parametrize("asked", ["double-fix=active", "double-fix=retired,active"])
def test_a_decision_that_is_as_required_is_not_reported(
    upstream: Upstream, arm: Callable[..., None], asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arm(upstream.overlay())

    assert cli.main(["audit", "--require", asked]) == 0
    assert "has to be" not in capsys.readouterr().err


def test_a_decision_that_is_not_as_required_is_reported_with_its_reason(
    upstream: Upstream, arm: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    upstream.write(FIXED_TEXT)
    arm(upstream.overlay(), gate_of(upstream))

    asked = ("--require", "double-fix=active", "--require", "double-trouble=absent,retired")
    assert cli.main(["audit", *asked]) == 4

    said = capsys.readouterr()
    assert "double-fix" in said.out
    [line] = [each for each in said.err.splitlines() if "has to be" in each]
    assert line.startswith("megacpp-overlays: double-fix has to be active and is retired: read: return x + x")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("double-fxi=active", "there is no overlay double-fxi; did you mean double-fix?"),
        ("double-fix=actve", "there is no decision 'actve'; did you mean active?"),
        ("double-fix=active,", "there is no decision ''"),
        ("double-fix", "ID=DECISION is wanted, such as double-fix=active"),
        ("double-fix=", "ID=DECISION is wanted"),
    ],
)
def test_an_invalid_requirement_is_wrong_usage_and_imports_nothing(
    upstream: Upstream, arm: Callable[..., None], asked: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arm(upstream.overlay())

    with pytest.raises(SystemExit) as caught:
        cli.main(["audit", "--require", asked])

    assert caught.value.code == 2
    assert f"--require {asked}: {says}" in capsys.readouterr().err
    assert upstream.module_name not in sys.modules


# --expect


def test_an_audit_matches_its_own_json(
    upstream: Upstream, arm: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arm(upstream.overlay(), gate_of(upstream))
    assert cli.main(["audit", "--json"]) == 0
    path = tmp_path / "lane.json"
    path.write_text(capsys.readouterr().out)

    assert cli.main(["audit", "--expect", str(path)]) == 0


@pytest.mark.parametrize(
    ("decisions", "says"),
    [
        ({"double_fix": "retired"}, "double-fix has to be retired and is active: return x + x + 1"),
        ({"double_fix": "active", "gone": "active"}, "gone has to be active and is not in this package"),
        ({"other": "absent"}, "double-fix has to be in the kept audit and is active"),
    ],
    ids=["another decision", "an overlay that is gone", "a new one that changes something"],
)
def test_a_difference_from_the_kept_audit_is_named(
    upstream: Upstream,
    arm: Callable[..., None],
    kept: Callable[..., Path],
    decisions: dict[str, str],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arm(upstream.overlay())

    assert cli.main(["audit", "--expect", str(kept(**decisions))]) == 4
    assert f"megacpp-overlays: {says}" in capsys.readouterr().err


def test_a_new_overlay_that_changes_nothing_is_accepted(
    upstream: Upstream, arm: Callable[..., None], kept: Callable[..., Path]
) -> None:
    upstream.write(FIXED_TEXT)
    arm(upstream.overlay())

    assert cli.main(["audit", "--expect", str(kept())]) == 0


@pytest.mark.parametrize("text", [None, "{}", "not JSON"], ids=["no file", "no audit", "no JSON"])
def test_a_file_that_is_no_audit_is_wrong_usage(
    upstream: Upstream, arm: Callable[..., None], tmp_path: Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    arm(upstream.overlay())
    path = tmp_path / "kept.json"
    if text is not None:
        path.write_text(text)

    with pytest.raises(SystemExit) as caught:
        cli.main(["audit", "--expect", str(path)])

    assert caught.value.code == 2
    assert f"--expect {path} " in capsys.readouterr().err


def test_a_conflict_comes_before_a_requirement(
    upstream: Upstream, arm: Callable[..., None], kept: Callable[..., Path]
) -> None:
    upstream.write(UNKNOWN)
    arm(upstream.overlay())

    assert cli.main(["audit", "--require", "double-fix=active"]) == 1
    assert cli.main(["audit", "--expect", str(kept(double_fix="conflict"))]) == 1


# An environment that is not the launcher's


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.STRICT])
def test_an_environment_without_any_target_distribution_fails(
    upstream: Upstream, arm: Callable[..., None], mode: Mode, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = Target(distribution="nowhere", module="nowhere.at.all", symbol="double")
    arm(upstream.overlay(target=nowhere), mode=mode)

    assert cli.main(["audit"]) == 3

    said = capsys.readouterr()
    assert "absent" in said.out
    assert (
        "none of the packages is here that overlays are about (nowhere); run the audit with the Python of" in said.err
    )


def test_a_distribution_without_the_target_module_is_enough(upstream: Upstream, arm: Callable[..., None]) -> None:
    gone = Target(distribution=upstream.name, module=f"{upstream.name}.gone.since", symbol="double")
    arm(upstream.overlay(target=gone))

    assert cli.main(["audit"]) == 0


# One overlay


def test_one_overlay_is_explained_and_no_other_target_is_imported(
    upstream: Upstream, arm: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    upstream.write(UNKNOWN, module="other")
    other = upstream.overlay(id="other-fix", target=Target(upstream.name, f"{upstream.name}.other", "double"))
    arm(upstream.overlay(), other)

    assert cli.main(["audit", "double-fix"]) == ExitCode.CLEAN

    out = capsys.readouterr().out
    assert out.startswith("double-fix (pack 99), overlay for ")
    assert "here       active on " in out
    assert "other-fix" not in out
    assert f"{upstream.name}.other" not in sys.modules


def test_an_overlay_that_is_off_is_explained_with_its_finding(
    upstream: Upstream, arm: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    arm(upstream.overlay(opt_in=True))

    assert cli.main(["audit", "double-fix"]) == ExitCode.CLEAN

    out = capsys.readouterr().out
    assert "disabled on " in out
    assert "BROKEN, shape off-by-one" in " ".join(out.split())
    assert "MEGACPP_OVERLAY_DOUBLE_FIX=on (it is off by default)" in out


def test_one_overlay_in_conflict_fails(upstream: Upstream, arm: Callable[..., None]) -> None:
    upstream.write(UNKNOWN)
    arm(upstream.overlay())

    assert cli.main(["audit", "double-fix"]) == ExitCode.FOUND


@pytest.mark.parametrize("option", ["--json", "-v", "--require=double-fix=active"])
def test_an_id_excludes_other_options(
    upstream: Upstream, arm: Callable[..., None], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arm(upstream.overlay())

    with pytest.raises(SystemExit) as ended:
        cli.main(["audit", option, "double-fix"])

    assert ended.value.code == ExitCode.USAGE
    assert "an ID excludes --json" in capsys.readouterr().err


# Output forms


def test_verbose_prints_the_defect_of_each_overlay(
    upstream: Upstream, arm: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    arm(upstream.overlay())

    cli.main(["audit", "-v"])

    assert "without it: every double is one too large" in capsys.readouterr().out


def test_the_printed_schema_validates_the_printed_json(
    upstream: Upstream, arm: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    arm(upstream.overlay())

    assert cli.main(["audit", "--schema"]) == ExitCode.CLEAN
    schema = json.loads(capsys.readouterr().out)
    cli.main(["audit", "--json"])

    jsonschema.validate(json.loads(capsys.readouterr().out), schema)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "variables", "coloured"),
    [
        (Terminal, {}, True),
        (Terminal, {"NO_COLOR": "1"}, False),
        (Terminal, {"TERM": "dumb"}, False),
        (io.StringIO, {}, False),
    ],
    ids=["terminal", "no colour", "dumb", "file"],
)
def test_colours_are_for_a_terminal_that_wants_them(
    upstream: Upstream,
    arm: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    stream: type[io.StringIO],
    variables: dict[str, str],
    coloured: bool,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    arm(upstream.overlay(title="clears\x1b[2J"))
    out = stream()
    monkeypatch.setattr(sys, "stdout", out)

    cli.main(["audit"])

    assert ("\x1b[1;32mactive\x1b[0m\n" in out.getvalue()) is coloured
    assert "\x1b[2J" not in out.getvalue()


def test_no_log_line_repeats_the_audit(upstream: Upstream) -> None:
    done = launch("-m", "megacpp_overlays", "audit", "double-fix", env=environment(upstream))

    assert "active on " in done.stdout
    assert done.stderr == f"megacpp-overlays: importing 1 module of {upstream.name}\n"
