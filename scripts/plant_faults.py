"""Plant faults, one at a time, and see that a test of `make test` goes red for each: a mutation test of chosen mutants.

plant_faults.py                plant every fault of tests/faults.toml
plant_faults.py --only ID      plant this one; may be repeated
plant_faults.py --write PATH   write the table there as well

The named tests run on the unchanged tree first, and must pass. Then the script edits one file at a time, runs the tests of
that fault except those marked `full` or `gpu` and those that `make test` leaves out (--kept), and restores the content and the modification time of the file. A killed
process leaves its fault in the file; `git checkout -- FILE` removes it. Files with uncommitted changes are refused. Exit 1
if a fault went unnoticed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import tomllib

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "faults.toml"
PYTEST = (".venv/bin/pytest", "-q", "-m", "not full and not gpu", "-p", "no:cacheprovider")
LIMIT_S = 900
"""Time limit of the tests of one fault, in seconds. A fault that makes them hang counts as unnoticed."""
_latest_s = 0
"""Modification time of the last fault, in seconds since the epoch."""
_GREEN, _RED, _COLLECTION_FAILED = 0, 1, 2
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", re.MULTILINE)


class FaultError(Exception):
    """Raised where a fault cannot be planted: the table or the tree is not as it has to be."""


@dataclass(frozen=True)
class Fault:
    """A mutant: one edit of one file, and the tests or the command that have to notice it."""

    id: str
    kind: str
    """The part of the project that it is in."""
    file: str
    """Relative to the checkout."""
    old: str
    new: str
    caught_by: tuple[str, ...] = ()
    """Node ids of tests."""
    command: str = ""
    """A check of `make test` other than pytest, for a fault that only such a check notices."""
    count: int = 1
    """Number of occurrences of `old` in the file; all are replaced."""
    breaks_import: bool = False
    """Whether an error during collection counts as noticed."""

    @property
    def path(self) -> Path:
        """The file."""
        return ROOT / self.file

    def planted(self, text: str) -> str:
        """Return the text of the file with the fault in it.

        Raises:
            FaultError: the text to replace is not in it as often as the table says, or nothing changes.
        """
        if (found := text.count(self.old)) != self.count:
            raise FaultError(f"{self.id}: the text is {found} times in {self.file}, and not {self.count} times")
        if self.old == self.new:
            raise FaultError(f"{self.id} changes nothing")
        return text.replace(self.old, self.new)

    def run(self) -> Run:
        """Run the tests or the command that have to notice the fault as `make test` would, up to the first test that fails."""
        return run(shlex.split(self.command) if self.command else [*PYTEST, "--kept", "-x", *self.caught_by])


class Run(NamedTuple):
    """Exit code, duration in seconds and output of a command."""

    code: int
    seconds: float
    output: str

    def is_red(self, fault: Fault) -> bool:
        """Return whether a test failed; wrong usage and an empty selection do not count."""
        return self.code == _RED or (fault.breaks_import and self.code == _COLLECTION_FAILED)

    def noticed_by(self, fault: Fault) -> str:
        """Return the name of the test that failed, or the command."""
        found = _FAILED.search(self.output)
        return fault.command or (found[1] if found else " ".join(fault.caught_by))


class Outcome(NamedTuple):
    """A planted fault, and the run of its tests."""

    fault: Fault
    ended: Run

    @property
    def is_noticed(self) -> bool:
        """Whether a test went red."""
        return self.ended.is_red(self.fault)

    def __str__(self) -> str:
        noticed = (
            f"`{self.ended.noticed_by(self.fault)}`" if self.is_noticed else f"**nothing** (exit {self.ended.code})"
        )
        return f"| {self.fault.id} | {self.fault.kind} | {noticed} | {self.ended.seconds:.0f} |"


HEAD = "| fault | kind | what notices it | seconds |\n|---|---|---|---|"


def main() -> int:
    """Plant the faults that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="plant this fault; may be repeated")
    parser.add_argument("--write", type=Path, metavar="PATH", help="write the table there as well")
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    try:
        faults = chosen(read(TABLE), given.only)
        for fault in faults:
            refuse_uncommitted(fault)
        check_green(faults)
        print(HEAD, flush=True)
        outcomes = []
        for fault in faults:
            outcomes.append(plant(fault))
            print(outcomes[-1], flush=True)
    except FaultError as error:
        print(error, file=sys.stderr)
        return 1
    if given.write is not None:
        given.write.write_text("\n".join([HEAD, *map(str, outcomes)]) + "\n", encoding="utf-8")
    unnoticed = [each for each in outcomes if not each.is_noticed]
    for each in unnoticed:
        print(f"\nnothing notices {each.fault.id}:\n{each.ended.output[-2000:]}", file=sys.stderr)
    print(f"\n{len(outcomes) - len(unnoticed)} of {len(outcomes)} faults noticed", file=sys.stderr)
    return int(bool(unnoticed))


def read(path: Path) -> list[Fault]:
    """Return the faults of a table."""
    rows: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    return [Fault(**{**row, "caught_by": tuple(row.get("caught_by", ()))}) for row in rows]


def chosen(faults: Sequence[Fault], ids: Sequence[str]) -> list[Fault]:
    """Return the faults of these ids, or all if there are none.

    Raises:
        FaultError: there is no such fault.
    """
    if strange := set(ids) - {each.id for each in faults}:
        raise FaultError(f"there is no fault {', '.join(sorted(strange))}")
    return [each for each in faults if each.id in ids or not ids]


def refuse_uncommitted(fault: Fault) -> None:
    """Refuse a file that differs from the last commit: a person's work is in it.

    Raises:
        FaultError: it does, or git knows no such file.
    """
    command = ["git", "status", "--porcelain", "--ignored", "--", fault.file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    if done.stdout or not fault.path.is_file():
        raise FaultError(f"{fault.id}: {fault.file} is not as it was committed")


def check_green(faults: Sequence[Fault]) -> None:
    """Run all that is to go red on the tree as it is.

    Raises:
        FaultError: something is red already, or a fault has nothing that could notice it.
    """
    if silent := [each.id for each in faults if not each.caught_by and not each.command]:
        raise FaultError(f"nothing is named that notices {', '.join(silent)}")
    tests = dict.fromkeys(test for fault in faults for test in fault.caught_by)
    commands = dict.fromkeys(fault.command for fault in faults if fault.command)
    for command in [*([[*PYTEST, *tests]] if tests else []), *map(shlex.split, commands)]:
        ended = run(command)
        if ended.code != _GREEN:
            raise FaultError(f"red without a fault:\n{ended.output[-4000:]}")


def plant(fault: Fault) -> Outcome:
    """Put one fault in, run the tests or the command that have to notice it, and take it out again.

    Raises:
        FaultError: it does not fit the file.
    """
    refuse_uncommitted(fault)
    with in_place(fault):
        return Outcome(fault, fault.run())


@contextlib.contextmanager
def in_place(fault: Fault) -> Iterator[None]:
    """Have the fault in its file for a block.

    Python compares bytecode with the size and the whole seconds of a file. So each fault gets a later second than the file and
    every fault before it, and the file gets its own time back: no bytecode of one is run for another.
    """
    global _latest_s
    before, was = fault.path.read_bytes(), fault.path.stat()
    _latest_s = max(_latest_s, int(was.st_mtime), int(time.time())) + 1
    planted = fault.planted(before.decode()).encode()
    try:
        fault.path.write_bytes(planted)
        os.utime(fault.path, (was.st_atime, _latest_s))
        yield
    finally:
        fault.path.write_bytes(before)
        os.utime(fault.path, ns=(was.st_atime_ns, was.st_mtime_ns))


def run(command: Sequence[str]) -> Run:
    """Run a command in the checkout; it ends with all that it started."""
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        code = process.returncode
    except subprocess.TimeoutExpired:
        output, code = f"not done after {LIMIT_S} s", -signal.SIGKILL
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Run(code, time.monotonic() - began, output)


def _end(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
