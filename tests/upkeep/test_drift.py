"""`megacpp-overlays drift`: a release that pip installed, edits of its files, and the command's report of them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import launchers
import pytest
from drift_environments import install, make_wheel
from made_up import Upstream
from places import HANG_S, ROOT

from megacpp_overlays import cli
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.loader import registry
from megacpp_overlays.loader import session as sessions
from megacpp_overlays.loader.session import Session
from megacpp_overlays.upkeep.drift import installations

Drift = Callable[..., subprocess.CompletedProcess[str]]
LOSS = "liger_kernel/ops/rms_norm.py"


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory, wheel: Callable[[str, str], Path]) -> Path:
    """A folder with liger-kernel 0.8.5, installed from its wheel."""
    folder = tmp_path_factory.mktemp("release") / "target"
    install(folder, "liger_kernel==0.8.5", find_links=wheel("liger-kernel", "0.8.5").parent)
    return folder


@pytest.fixture
def target(release: Path, tmp_path: Path) -> Path:
    """A copy of the installed release that a test may edit."""
    return Path(shutil.copytree(release, tmp_path / "target"))


@pytest.fixture
def drift(target: Path) -> Drift:
    """Run the command with the copy first on the path."""

    def run(
        *words: str | Path, only: bool = True, env: Mapping[str, str] = os.environ
    ) -> subprocess.CompletedProcess[str]:
        chosen = ["--distribution", "liger-kernel"] if only else []
        command = [sys.executable, "-m", "megacpp_overlays", "drift", *chosen, *map(str, words)]
        path = os.pathsep.join([str(target), str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
        env = {**env, "PYTHONPATH": path, "MEGACPP_OVERLAYS_LOG": "logging"}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=HANG_S)

    return run


def test_a_release_as_published_is_no_drift(drift: Drift) -> None:
    done = drift()

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[2].split() == ["liger-kernel", "0.8.5", "RECORD", "294", "-", "clean"]
    assert done.stdout.endswith("\nno drift\n")


def test_hands_in_it_are_named_file_by_file_with_the_way_out(drift: Drift, target: Path) -> None:
    (target / LOSS).write_text("# a hot fix\n")
    (target / "liger_kernel" / "functional.py").unlink()
    (target / "liger_kernel" / "hot" / "deep").mkdir(parents=True)
    (target / "liger_kernel" / "hot" / "deep" / "fix.py").write_text("")

    done = drift()

    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "1 changed, 1 missing, 1 added  untracked" in lines[2]
    assert [line.strip() for line in lines if line.startswith("  liger-kernel: ")] == [
        "liger-kernel: liger_kernel/functional.py missing",
        "liger-kernel: liger_kernel/hot/deep/fix.py added",
        f"liger-kernel: {LOSS} changed",
    ]
    assert lines[-1] == (
        "next: liger-kernel: make an overlay of the change, or undo it: delete the added files, then pip install "
        "--force-reinstall --no-cache-dir --no-deps liger-kernel==0.8.5"
    )


def test_data_has_the_hash_of_each_file_that_differs(drift: Drift, target: Path) -> None:
    (target / "liger_kernel" / "hot.py").write_text("")
    (target / "liger_kernel" / "functional.py").unlink()

    data = json.loads(drift("--json").stdout)

    (row,) = data["distributions"]
    assert (data["clean"], row["state"]) == (False, "untracked")
    assert row["differences"] == [
        {"file": "liger_kernel/functional.py", "kind": "missing", "sha256": None},
        {"file": "liger_kernel/hot.py", "kind": "added", "sha256": hashlib.sha256().hexdigest()},
    ]


def test_quick_and_distributions_that_cannot_be_checked_are_named(drift: Drift, target: Path) -> None:
    quick = drift("--quick")
    (target / "liger_kernel-0.8.5.dist-info" / "RECORD").unlink()
    unchecked = drift()

    assert quick.returncode == 0
    assert "quick: only sizes were compared; a change that keeps the size goes unseen" in quick.stdout
    assert unchecked.returncode == 1
    assert "cannot be checked:\n  liger-kernel: it was installed without a RECORD by pip" in unchecked.stdout
    assert "next: liger-kernel: make it checkable: pip install" in unchecked.stdout


# In a process


def test_replacements_of_a_launcher_and_of_overlays_are_both_named(drift: Drift, upstream: Upstream) -> None:
    env = launchers.environment(upstream)
    launcher = f"launcher_of_{upstream.name}"
    text = """
        import functools
        import NAME.layers as target

        @functools.wraps(target.Layer.forward)
        def quick(self, x):
            return x

        target.Layer.forward = quick
        """
    (upstream.folder / f"{launcher}.py").write_text(textwrap.dedent(text).replace("NAME", upstream.name))

    done = drift("--import", launcher, env=env)
    data = json.loads(drift("--import", launcher, "--json", env=env).stdout)

    assert done.returncode == 1
    assert "1 names lead to third-party code, 1 to an overlay's" in done.stdout
    assert f"untracked: {upstream.module_name}.Layer.forward is now {launcher}.quick (" in done.stdout
    assert f"{launcher}.py:5)" in done.stdout
    assert f"tracked: {upstream.module_name}.double by overlay double-fix" in done.stdout
    assert (
        "next: make an overlay of the replacement, or remove the replacement from the code that installs it"
        in done.stdout
    )
    replaced = {each["symbol"]: each["overlay"] for each in data["running"]["replaced"]}
    assert replaced == {"Layer.forward": None, "double": "double-fix"}


def test_a_launcher_that_replaces_nothing_is_clean_and_one_that_fails_is_an_error(
    drift: Drift, upstream: Upstream
) -> None:
    # A gate about a library that is installed here would write to stderr, too.
    gates = {each.variable: "off" for each in registry.load() if not each.installs}
    env = launchers.environment(upstream, **gates)
    upstream.write("raise OSError('no such device')\n", module="failing")

    quiet = drift("--import", upstream.module_name, env=env)
    failing = drift("--import", f"{upstream.name}.failing", env=env)

    assert quiet.returncode == 0
    assert "0 names lead to third-party code" in quiet.stdout
    assert failing.returncode == ExitCode.NOT_CHECKED
    assert failing.stderr == f"megacpp-overlays: --import {upstream.name}.failing: OSError: no such device\n"


# Usage


def test_wrong_usage_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["drift", "--all", "--distribution", "torch"])

    assert caught.value.code == 2
    assert "--distribution: not allowed with argument --all" in capsys.readouterr().err


def test_bad_input_is_one_line_and_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["drift", "--distribution", "never-published"]) == ExitCode.NOT_CHECKED

    assert "--distribution never-published: no such distribution is installed here" in capsys.readouterr().err


def test_a_distribution_that_was_asked_for_and_is_not_here_is_not_clean(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megacpp_overlays.upkeep.drift.drift.STACK", {"lab-stack": "lab_stack_that_is_not_here"})

    assert cli.main(["drift", "--distribution", "lab-stack"]) == 1

    says = capsys.readouterr().out
    assert "not installed: lab-stack" in says
    assert "next: install these distributions, or put their checkouts on PYTHONPATH: lab-stack" in says
    assert "no drift" not in says


def test_all_includes_distributions_that_were_not_asked_for(
    tmp_path: Path,
    session: Callable[..., Session],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(tmp_path / "target", make_wheel(tmp_path / "wheels", "lab_only", "1.0", {"lab_only.py": ""}))
    made, found = session(), installations.find_all([str(tmp_path / "target")])
    monkeypatch.setattr(sessions, "current", lambda: made)
    monkeypatch.setattr(installations, "find_all", lambda: found)
    monkeypatch.setattr("megacpp_overlays.upkeep.drift.drift.STACK", {})
    monkeypatch.syspath_prepend(tmp_path / "target")

    assert cli.main(["drift", "--all"]) == 0
    assert "lab-only      1.0" in capsys.readouterr().out
    assert cli.main(["drift"]) == 0
    assert "lab-only" not in capsys.readouterr().out


@pytest.mark.upstream
def test_the_environment_of_this_run_is_as_published(drift: Drift, target: Path) -> None:
    shutil.rmtree(target)  # only the real installation

    done = drift("--quick", "--json", only=False)

    data = json.loads(done.stdout)
    assert {"torch", "megatron-core", "liger-kernel"} <= {row["distribution"] for row in data["distributions"]}
    assert [row["distribution"] for row in data["distributions"] if row["state"] != "clean"] == []
    assert done.returncode == 0
