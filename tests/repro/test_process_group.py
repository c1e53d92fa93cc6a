"""A command that runs in a group of its own leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import ROOT
from running import demand_end, is_running

from megacpp_overlays.repro import process_group


def run(code: str, folder: Path, *, timeout: float = 60, grace: float = 0) -> str | None:
    return process_group.run(
        [sys.executable, "-c", code],
        folder=folder,
        environment=dict(os.environ),
        output=subprocess.DEVNULL,
        timeout=timeout,
        grace=grace,
    )


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("pass", None),
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by signal 9 (Killed)"),
    ],
)
def test_how_it_ended_is_said_in_words(code: str, says: str | None, tmp_path: Path) -> None:
    assert run(code, tmp_path) == says


def test_its_child_processes_end_with_it(tmp_path: Path) -> None:
    code = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "pathlib.Path('child').write_text(str(child.pid))\n"
    )

    assert run(code, tmp_path) is None

    demand_end((tmp_path / "child").read_text())


def test_a_process_that_takes_too_long_gets_sigterm_and_time_to_end(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n    pathlib.Path('ended').touch()\n    sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(600)\n"
    )

    assert run(code, tmp_path, timeout=2, grace=60) == "took more than 2 seconds"
    assert (tmp_path / "ended").exists() == (tmp_path / "ready").exists()


def test_children_end_with_the_process_that_asked_for_them_however_that_ends(tmp_path: Path) -> None:
    """SIGKILL leaves no time for anything."""
    code = (
        "import os, subprocess, sys\n"
        "from pathlib import Path\n"
        "from megacpp_overlays.repro import process_group\n"
        "command = ['sh', '-c', 'sleep 600 & echo $$ $! > written; mv written pids; wait']\n"
        "process_group.run(command, folder=Path(sys.argv[1]), environment=dict(os.environ),\n"
        "                  output=subprocess.DEVNULL, timeout=600)\n"
    )
    asker = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    while not (tmp_path / "pids").exists():
        assert asker.poll() is None
        time.sleep(0.01)
    started = (tmp_path / "pids").read_text().split()
    assert all(map(is_running, started))

    asker.kill()
    asker.wait()

    demand_end(*started)


def test_nothing_is_left_of_the_watching_process(tmp_path: Path) -> None:
    before = children_of(os.getpid())

    assert run("pass", tmp_path) is None

    assert children_of(os.getpid()) == before


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
