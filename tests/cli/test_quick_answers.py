"""Commands that answer from files: no library that overlays are about is imported for them, so they take a second or two."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import enabled_environments
import pytest
from launchers import environment, launch
from made_up import BROKEN_TEXT, FIXED_TEXT, Upstream, gate_of
from places import HANG_S, ROOT

from megacpp_overlays.loader import quick
from megacpp_overlays.loader.settings import Mode, Settings
from megacpp_overlays.model import Decision

pytestmark = pytest.mark.unmeasured_children

HEAVY = ("torch", "triton", "numpy", "megatron", "liger_kernel", "mamba_ssm", "transformer_engine", "tilelang")
NAMES_HEAVY_ONES = f"""
import sys
from megacpp_overlays.cli import main
code = main(sys.argv[1:])
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


def one_line(text: str) -> str:
    """Return a text without the ends of its lines, which depend on how long names are."""
    return " ".join(text.split())


@pytest.mark.parametrize("words", [["info"], ["audit", "--quick"], ["explain", "scheduler-restore"]], ids=" ".join)
def test_nothing_of_upstream_is_imported(words: list[str]) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", NAMES_HEAVY_ONES, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )

    print(f"{' '.join(words)}: {time.monotonic() - began:.2f} s")  # noqa: T201 - a second or so on an idle host
    assert done.returncode == 0, done.stderr
    assert done.stderr == "[]\n"


# --- audit --quick --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mode", "decision"),
    [
        pytest.param(None, Mode.AUTO, Decision.ACTIVE, id="broken"),
        pytest.param(FIXED_TEXT, Mode.AUTO, Decision.RETIRED, id="fixed"),
        pytest.param("def double(x):\n    return 2 * x + 1\n", Mode.AUTO, Decision.CONFLICT, id="unrecognised"),
        pytest.param(None, Mode.OBSERVE, Decision.DISABLED, id="observed"),
        pytest.param(None, Mode.OFF, Decision.DISABLED, id="off"),
    ],
)
def test_files_give_the_decision_of_an_import(
    upstream: Upstream, text: str | None, mode: Mode, decision: Decision
) -> None:
    if text is not None:
        upstream.write(text)

    [record] = quick.audit([upstream.overlay()], Settings(mode=mode)).records

    assert record.decision is decision
    assert upstream.module_name not in sys.modules


def test_a_distribution_that_is_not_installed_is_absent(upstream: Upstream, tmp_path: Path) -> None:
    missing = Upstream("not_here_at_all", tmp_path)

    [record] = quick.audit([missing.overlay()], Settings()).records

    assert record.decision is Decision.ABSENT


def test_an_overlay_whose_needs_are_not_met_is_a_conflict(upstream: Upstream) -> None:
    first = upstream.overlay()
    second = upstream.overlay(id="second-fix", needs=("double-fix",))
    off = Settings(disabled=frozenset({"double-fix"}))

    assert quick.audit([first, second], Settings()).records[1].decision is Decision.ACTIVE
    record = quick.audit([first, second], off).records[1]

    assert record.decision is Decision.CONFLICT
    assert record.reason.startswith("it needs double-fix, which is disabled here")


def test_a_gate_is_decided_as_when_a_process_arms(upstream: Upstream) -> None:
    (upstream.folder / upstream.name / "notes.txt").write_text("does not work")

    [record] = quick.audit([gate_of(upstream)], Settings()).records

    assert record.decision is Decision.GATED


def test_a_quick_audit_says_that_it_is_one_and_keeps_the_exit_codes(upstream: Upstream) -> None:
    env = environment(upstream)
    words = ("-m", "megacpp_overlays", "audit", "--quick")

    broken = launch(*words, "--require", "double-fix=active", env=env)
    unmet = launch(*words, "--require", "double-fix=retired", env=env)
    upstream.write("def double(x):\n    return 2 * x + 1\n")
    unknown = launch(*words, env=env)

    assert (broken.returncode, unmet.returncode, unknown.returncode) == (0, 4, 1)
    assert "fingerprint none (--quick)" in broken.stdout
    assert "quick: read from files. Nothing was imported" in broken.stdout


@pytest.mark.parametrize("word", ["--json", "--deep", "--witness", "double-fix"])
def test_a_quick_audit_refuses_options_that_need_an_import(upstream: Upstream, word: str) -> None:
    done = launch("-m", "megacpp_overlays", "audit", "--quick", word, env=environment(upstream))

    assert done.returncode == 2
    assert "--quick places no seam" in done.stderr


# --- progress of an audit while it imports --------------------------------------------------------------------


def test_an_audit_names_its_imports_at_once_and_counts_lines_of_others(upstream: Upstream) -> None:
    noisy = "import sys, warnings\nwarnings.warn('old name')\nprint('loading kernels', file=sys.stderr)\n"
    upstream.write(noisy + BROKEN_TEXT)
    env = environment(upstream)

    short = launch("-m", "megacpp_overlays", "audit", env=env)
    verbose = launch("-m", "megacpp_overlays", "audit", "-v", env=env)

    lines = short.stderr.splitlines()
    assert f"megacpp-overlays: importing 1 module of {upstream.name}" in lines
    assert re.fullmatch(
        r"megacpp-overlays: other libraries said \d+ lines while .* `megacpp-overlays audit -v` prints them", lines[-1]
    )
    assert "loading kernels" not in short.stderr
    assert {"  | loading kernels", "  | UserWarning: old name"} <= set(verbose.stderr.splitlines())


# --- explain --------------------------------------------------------------------------------------------------


def test_an_overlay_is_explained_where_nothing_is_installed(tmp_path: Path) -> None:
    bare = enabled_environments.make(tmp_path / "venv")

    done = bare.command("explain", "scheduler-restore")

    assert done.returncode == 0
    assert "repairs    megatron-core 0.9.0 to 0.1" in done.stdout
    assert "here       absent on megatron-core" in done.stdout
    assert "switch     MEGACPP_OVERLAY_SCHEDULER_RESTORE=off" in done.stdout
    assert "reproduce  megacpp-overlays repro 48" in done.stdout


def test_an_overlay_that_is_off_is_explained_with_the_finding_here(upstream: Upstream) -> None:
    env = environment(upstream, MEGACPP_OVERLAY_DOUBLE_FIX="off")

    done = launch("-m", "megacpp_overlays", "explain", "double-fix", env=env)

    assert "here       disabled on " in done.stdout
    assert "BROKEN, shape " in one_line(done.stdout)


# --- info -----------------------------------------------------------------------------------------------------


def facts(upstream: Upstream, **variables: str) -> dict[str, object]:
    done = launch("-m", "megacpp_overlays", "info", "--json", env=environment(upstream, **variables))
    found: dict[str, object] = json.loads(done.stdout)
    return {**found, "code": done.returncode}


def test_settings_in_force_are_listed_with_the_mode(upstream: Upstream) -> None:
    found = facts(upstream, MEGACPP_OVERLAYS="observe", MEGACPP_OVERLAY_DOUBLE_FIX="off")

    assert (found["code"], found["mode"], found["wrong"]) == (0, "observe", "")
    assert found["settings"] == {
        "MEGACPP_OVERLAYS": "observe",
        "MEGACPP_OVERLAYS_PLUGINS": "double",
        "MEGACPP_OVERLAY_DOUBLE_FIX": "off",
    }
    assert found["plugins"] == {"double": "asked for"}


def test_a_wrong_setting_is_reported_and_so_is_the_rest(upstream: Upstream) -> None:
    found = facts(upstream, MEGACPP_OVERLAYS="obsrve")

    assert (found["code"], found["mode"]) == (2, "")
    assert (
        found["wrong"]
        == "MEGACPP_OVERLAYS=obsrve is not known; did you mean observe? known: auto, observe, off, strict"
    )
    assert found["version"]


def test_a_plugin_that_is_not_there_is_reported(upstream: Upstream) -> None:
    found = facts(upstream, MEGACPP_OVERLAYS_PLUGINS="triple")

    assert found["code"] == 2
    assert str(found["wrong"]).startswith(
        "MEGACPP_OVERLAYS_PLUGINS names triple, which is not installed; known: double"
    )
    assert found["plugins"] == {"double": "not asked for"}


def test_libraries_that_are_not_installed_and_extras_that_are_missing_are_named(tmp_path: Path) -> None:
    bare = enabled_environments.make(tmp_path / "venv")
    found = json.loads(bare.command("info", "--json").stdout)

    assert {"torch", "megatron-core", "liger-kernel"} <= set(found["not_installed"])
    assert "shtab>=1.7" in found["missing"]
    assert found["armed_by"] == ""


def test_it_says_which_file_arms_the_environment(tmp_path: Path) -> None:
    made = enabled_environments.make(tmp_path / "venv")
    made.command("enable")

    done = made.command("info")

    assert f"armed by file {made.file}" in one_line(done.stdout)
