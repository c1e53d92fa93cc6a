"""Runs of this package with the interpreter of another environment.

PYTHONPATH of the process leads to this package alone, so the process imports no other package of this environment, nor of the
user's site-packages. It inherits the variables of the shell, except those that `_NOT_INHERITED` names. Of this package's
settings it inherits only those for plugins and witnesses.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import megacpp_overlays
from megacpp_overlays.loader.settings import LOG, PLUGINS, WITNESSES
from megacpp_overlays.repro import process_group

_GRACE = 10.0
"""Seconds that a process gets to end its child processes after its time limit."""
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "MEGACPP_", "COVERAGE_")
"""Prefixes of environment variables that the process does not inherit, except `PLUGINS` and `WITNESSES`."""


class Reply(NamedTuple):
    """The answer of a process in another environment."""

    answer: Any
    """The parsed JSON that `upkeep.inside` wrote; None if the process failed."""
    problem: str | None
    """The way the process ended, and its last line of output; None if it gave an answer."""


def ask(python: Path, arguments: Sequence[str], timeout: float) -> Reply:
    """Run `upkeep.inside` with an interpreter and return its answer.

    Args:
        python: the interpreter.
        arguments: those of `upkeep.inside` after REPORT.
        timeout: seconds after which the process is ended.

    Raises:
        OSError: the interpreter cannot be started, or it ends with exit code 0 and writes no report.
        ValueError: the report is not JSON.
    """
    with _workspace() as (folder, variables), tempfile.TemporaryFile("w+", errors="replace") as out:
        report = folder / "report"
        command = [str(python), "-m", "megacpp_overlays.upkeep.inside", str(report), *arguments]
        ended = process_group.run(
            command, folder=folder, environment=variables, output=out, timeout=timeout, grace=_GRACE
        )
        if ended is None:
            return Reply(json.loads(report.read_text()), None)
        return Reply(None, f"the process {ended}: {_last_line(out)}")


def output(python: Path, arguments: Sequence[str], timeout: float) -> tuple[str, str | None]:
    """Run an interpreter; return its stdout, and a description of its failure, which is None if it succeeded.

    Args:
        python: the interpreter.
        arguments: those of the interpreter.
        timeout: seconds after which the process is ended.

    Raises:
        OSError: the interpreter cannot be started.
    """
    with _workspace() as (folder, variables), contextlib.ExitStack() as stack:
        out, errors = (stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(2))
        ended = process_group.run(
            [str(python), *arguments],
            folder=folder,
            environment=variables,
            output=out,
            errors=errors,
            timeout=timeout,
            grace=_GRACE,
        )
        out.seek(0)
        return out.read(), f"{ended}: {_last_line(errors)}" if ended else None


def _last_line(output: IO[str]) -> str:
    output.seek(0)
    return next((line for line in reversed(output.read().splitlines()) if line.strip()), "no output")


@contextlib.contextmanager
def _workspace() -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield an empty working folder, and the environment variables of a process that runs there.

    PYTHONPATH is a new folder with a link to this package. The folder that holds the package may be a site-packages, and would
    bring its other packages along.
    """
    with tempfile.TemporaryDirectory(prefix="upkeep-") as name:
        folder = Path(name).resolve()
        package = Path(str(megacpp_overlays.__file__)).parent
        path = folder / "path"
        path.mkdir()
        (path / package.name).symlink_to(package, target_is_directory=True)
        work = folder / "work"
        work.mkdir()
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in {PLUGINS, WITNESSES} or not name.startswith(_NOT_INHERITED)
        }
        yield work, {**kept, LOG: "logging", "PYTHONPATH": str(path), "PYTHONNOUSERSITE": "1"}
