"""Run of a benchmark on a CPU at tiny sizes, the folder of its results, and its page made once more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from places import HANG_S, ROOT


def run_quickly(benchmark: Path, folder: Path, *words: str) -> Path:
    """Run a benchmark with `--device cpu --quick`; return the folder, which has found.json and page.md then.

    Args:
        benchmark: its folder in `benchmarks`.
        folder: the folder of its results.
        words: further arguments.
    """
    files = ["--json", folder / "found.json", "--write", folder / "page.md"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", benchmark / "run.py", "--device", "cpu", "--quick", *words, *files],
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def page_without_torch(benchmark: Path, folder: Path, again: Path) -> str:
    """Return the page that the numbers of a run make in a Python without installed packages.

    Args:
        benchmark: its folder in `benchmarks`.
        folder: of a run, with found.json.
        again: the page to write.
    """
    command = [sys.executable, "-S", benchmark / "page.py", folder / "found.json", "--write", again]
    subprocess.run(command, check=True, capture_output=True, timeout=HANG_S)
    return again.read_text()
