"""Errors of commands: one sentence with the nearest name, lists behind a command, and no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launchers import environment, launch
from made_up import Upstream
from places import HANG_S, ROOT

from megacpp_overlays import cli
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.errors import RegistryError
from megacpp_overlays.loader import session
from megacpp_overlays.repro.progress import Progress

LONGEST = 300
"""Characters of an error that can be read in the log of a scheduler."""


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that is refused and return its error: at most a sentence and a pointer to the help."""
    try:
        code = cli.main(words)
    except SystemExit as error:
        code = int(str(error.code))
    said = capsys.readouterr().err
    assert code in {ExitCode.USAGE, ExitCode.NOT_CHECKED}, said
    assert len(said.splitlines()) <= 2
    assert len(said) < LONGEST
    return said


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["Audit"], "did you mean audit?"),
        (["audit", "Scheduler_Restore"], "did you mean scheduler-restore?"),
        (["audit", "--Json"], "did you mean --json?"),
        (["explain", "SCHEDULER-RESTORE"], "did you mean scheduler-restore?"),
        (["repro", "Scheduler-Restor"], "did you mean scheduler-restore?"),
        (["repro", "990"], "there is no pack 990; `megacpp-overlays repro --list` lists the "),
        (["repro", "48", "--case", "Rollbck"], "there is no case Rollbck; "),
        (["drift", "--distribution", "Megatron-cor"], "did you mean megatron-core?"),
        (["rehearse", "--known-until", "Megatron_cor=0.18.2"], "did you mean megatron-core?"),
        (["rehearse", "--known-until", "megatron-core=new"], "'new' is no version"),
        (["report", "x"], "known names is near"),
        (["report", "Scheduler-Restor"], "did you mean scheduler-restore?"),
        (["completion", "fish"], "choose from "),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_an_error_is_a_sentence_with_the_nearest_name_in_any_case(
    words: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert near in refused(words, capsys)


def test_a_pack_is_found_by_the_id_of_its_overlay(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["repro", "scheduler-restore", "--list"]) == 0
    assert capsys.readouterr().out.startswith("48-scheduler-restore\n")


def test_undoing_an_unknown_overlay_names_the_nearest() -> None:
    with pytest.raises(
        RegistryError, match=r"^there is no overlay Scheduler-Restor; did you mean scheduler-restore\?$"
    ):
        session.current().undo("Scheduler-Restor")


# --- under `run` ----------------------------------------------------------------------------------------------

BROKEN_PLUGIN = "raise RuntimeError('it needs another library')\n"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MEGACPP_OVERLAYS", "observ", "did you mean observe?"),
        ("MEGACPP_OVERLAY_DOUBLE_FX", "off", "did you mean MEGACPP_OVERLAY_DOUBLE_FIX?"),
        ("MEGACPP_OVERLAYS_DISABLE", "Double-Fix", "did you mean double-fix?"),
        ("MEGACPP_OVERLAYS_PLUGINS", "Doubel", "which is not installed; did you mean double? known: double"),
        ("MEGACPP_OVERLAYS_REQUIRE", "double-fix=Active", "did you mean active?"),
    ],
)
def test_a_wrong_setting_ends_a_run_without_a_traceback(
    upstream: Upstream, variable: str, value: str, said: str
) -> None:
    done = launch(
        "-m", "megacpp_overlays", "run", "-c", "print('trained')", env={**environment(upstream), variable: value}
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < LONGEST


@pytest.mark.parametrize("words", [("-m", "megacpp_overlays", "run"), ()], ids=["run", "start-up folder"])
def test_a_plugin_that_cannot_be_loaded_ends_a_process_without_a_traceback(
    upstream: Upstream, words: tuple[str, ...]
) -> None:
    env = environment(upstream)
    armed = launch("-m", "megacpp_overlays", "env", "--k8s", env=env).stdout
    upstream.write(BROKEN_PLUGIN, module="plugin")
    if not words:
        lines = armed.splitlines()
        pairs = zip(lines[::2], lines[1::2], strict=True)
        env |= {name.split()[-1]: value.partition("value: ")[2].strip('"') for name, value in pairs}

    done = launch(*words, "-c", "print('trained')", env=env)

    assert done.stdout == ""
    assert done.returncode != 0
    assert "plugin double cannot be loaded: RuntimeError: it needs another library" in done.stderr
    assert "Traceback" not in done.stderr


# --- files on disk need no HTTP client ------------------------------------------------------------------------

WITHOUT_HTTP = """
import sys
for name in ("requests", "urllib3", "pypi_simple", "jinja2"):
    sys.modules[name] = None
from megacpp_overlays.cli import main
sys.exit(main(sys.argv[1:]))
"""


def without_http(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_HTTP, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)


def test_saved_answers_about_threads_are_read_without_one(tmp_path: Path) -> None:
    done = without_http("sweep", "--offline", "--max-age", "100000")

    assert done.returncode in {ExitCode.CLEAN, ExitCode.FOUND}, done.stderr
    assert "from saved answers" in done.stdout


def test_a_matrix_over_files_needs_none(tmp_path: Path) -> None:
    done = without_http("matrix", "liger-kernel", "--offline", "--cache", str(tmp_path))

    assert done.returncode == ExitCode.NOT_CHECKED, "it looked into the cache, which is empty"
    assert "no answer of the index is in the cache" in done.stderr


@pytest.mark.parametrize("command", ["sweep", "matrix"])
def test_without_its_extra_a_command_names_the_extra_to_install(command: str) -> None:
    done = without_http(command)

    assert done.returncode == ExitCode.MISSING_EXTRA
    assert "needs requests, of the extra `upkeep`: pip install 'pypi-simple>=1.6' " in done.stderr
    assert "megacpp-overlays[" not in done.stderr, "no index has this project: the name may be anybody's"


# --- n of m ---------------------------------------------------------------------------------------------------


def test_progress_is_n_of_m_with_an_estimate_from_finished_items() -> None:
    now = iter([0.0, 30.0, 180.0, 300.0])
    progress = Progress(3, clock=lambda: next(now))

    assert [progress.done(name) for name in ("one", "two", "three")] == [
        "1 of 3: one; about 1 min left",
        "2 of 3: two; about 2 min left",
        "3 of 3: three",
    ]


def test_less_than_a_minute_is_shown_in_seconds() -> None:
    now = iter([0.0, 5.0])

    assert Progress(3, clock=lambda: next(now)).done("one") == "1 of 3: one; about 10 s left"
