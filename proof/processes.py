"""Processes of a proof: a Python with an environment of its own, and the message when it ends badly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ON_CPU = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""On the CPU whatever the host has, with one thread, so that the same sums have the same bits."""
LIMIT_S = 1800.0
"""Ends a process that would hang."""
RUN = ("-m", "megacpp_overlays", "run")
LINES = 15
TORCHRUN_REPORTS = "torch/distributed/elastic/multiprocessing/api.py"


class ProofError(Exception):
    """Raised where something cannot be measured; the text names the way out."""


class EndedError(ProofError):
    """Raised where a process ended otherwise than it may.

    Attributes:
        wrote: all that it wrote, without torchrun's own report, which says nothing of the cause.
    """

    def __init__(self, text: str, wrote: str) -> None:
        super().__init__(text)
        self.wrote = wrote


def start(
    words: Sequence[str | Path],
    env: Mapping[str, str],
    *,
    path: Sequence[Path] = (),
    cwd: Path,
    codes: tuple[int, ...] = (0,),
) -> str:
    """Run Python, wait for it, and return its standard output followed by its standard error.

    Args:
        words: of its command line.
        env: variables in addition to those of this process; no switch of this package is inherited.
        path: folders that come first on its path.
        cwd: where it runs.
        codes: with which it may end.

    Raises:
        EndedError: it ended otherwise; the end of its output is in the text.
        ProofError: it did not end.
    """
    command = [sys.executable, "-W", "ignore", *words]
    try:
        done = subprocess.run(
            command, env=variables(env, path), cwd=cwd, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ProofError(f"{_shown(words)} did not end in {LIMIT_S:.0f} s") from error
    wrote = done.stdout + done.stderr
    if done.returncode not in codes:
        lines = _without_report(wrote)
        end = "\n".join(lines[-LINES:])
        raise EndedError(f"{_shown(words)} ended with {done.returncode}:\n{end}", "\n".join(lines))
    return wrote


def variables(env: Mapping[str, str], path: Sequence[Path]) -> dict[str, str]:
    """Return the environment of a process: that of this one without switches of this package, and the given variables."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MEGACPP_", "PYTHON"))}
    clean |= {"PYTHONPATH": os.pathsep.join(map(str, path))} if path else {}
    return {**clean, **env}


def _shown(words: Sequence[str | Path]) -> str:
    """Return a command line up to its script, whose own words may be a hundred."""
    scripts = [place for place, word in enumerate(words) if isinstance(word, Path) and word.suffix == ".py"]
    end = scripts[-1] + 1 if scripts else len(words)
    shown = " ".join(word.name if isinstance(word, Path) else word for word in words[:end])
    return f"{shown} ..." if end < len(words) else shown


def _without_report(text: str) -> list[str]:
    """Return the lines of an output up to torchrun's own traceback."""
    lines = text.rstrip().splitlines()
    reported = [place for place, line in enumerate(lines) if TORCHRUN_REPORTS in line]
    return lines[: reported[0] if reported else None]
