"""A run of this package with the interpreter of another environment.

The process gets this package on its path and nothing else of this one: the switches and the PYTHONPATH of
the shell do not count there, and neither do the packages that are installed beside this one.
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
"""Seconds that a process gets to end what it started."""
_NOT_THEIRS = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "MEGACPP_", "COVERAGE_")
"""What the names of variables begin with that are for this environment and not for another."""


class Reply(NamedTuple):
    """What a process in an environment answered."""

    answer: Any
    """What `inside` wrote as JSON; None where it did not come to that."""
    problem: str | None
    """How the process ended and its last line, where it gave no answer."""


def ask(python: Path, arguments: Sequence[str], timeout: float) -> Reply:
    """Run `upkeep.inside` with an interpreter and return its answer."""
    with _place() as (folder, variables), tempfile.TemporaryFile("w+", errors="replace") as said:
        report = folder / "report"
        command = [str(python), "-m", "megacpp_overlays.upkeep.inside", str(report), *arguments]
        ended = process_group.run(
            command, folder=folder, environment=variables, output=said, timeout=timeout, grace=_GRACE
        )
        if ended is None:
            return Reply(json.loads(report.read_text()), None)
        return Reply(None, f"the process {ended}: {_last_line(said)}")


def output(python: Path, arguments: Sequence[str], timeout: float) -> tuple[str, str | None]:
    """Run an interpreter; return what it printed on stdout, and how it ended in words, or None if it ended well."""
    with _place() as (folder, variables), contextlib.ExitStack() as stack:
        said, complained = (stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(2))
        ended = process_group.run(
            [str(python), *arguments],
            folder=folder,
            environment=variables,
            output=said,
            errors=complained,
            timeout=timeout,
            grace=_GRACE,
        )
        said.seek(0)
        return said.read(), f"{ended}: {_last_line(complained)}" if ended else None


def _last_line(output: IO[str]) -> str:
    output.seek(0)
    return next((line for line in reversed(output.read().splitlines()) if line.strip()), "no output")


@contextlib.contextmanager
def _place() -> Iterator[tuple[Path, dict[str, str]]]:
    """Make an empty folder to run in, and the variables that put this package on the path.

    By a link of its own, because the folder that this package is in may be the site-packages of another environment.
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
            if name in {PLUGINS, WITNESSES} or not name.startswith(_NOT_THEIRS)
        }
        yield work, {**kept, LOG: "logging", "PYTHONPATH": str(path), "PYTHONNOUSERSITE": "1"}
