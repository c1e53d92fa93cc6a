"""One run of a group of tests in a process of its own: how it is started, when it is ended, and how its tests ended."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from claims import Found
from megatron_unit_ends import End, by_file
from megatron_unit_groups import FOLDER, Group
from processes import LINES, RUN, ProofError, variables
from upstream_tests import LAUNCHERS, calls

PYTEST = (
    *("-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "finished"),
    "--continue-on-collection-errors",
)
LATE_S = 45.0
"""How long the last test that was begun in time may take beyond the limit, imports included."""

_PORTS = itertools.cycle(range(21000 + os.getpid() % 1000, 29000))


@dataclass(frozen=True)
class Stand:
    """Where a way of running tests has its files to itself, and with which variables."""

    root: Path
    """A copy of the checkout."""
    env: Mapping[str, str]
    path: tuple[Path, ...]
    armed: bool
    limit_s: float
    ranks: int = 1
    """Processes of the world in which tests run."""


def run(group: Group, stand: Stand) -> Found:
    """Return how the tests of a group ended, as many as were finished in time.

    Raises:
        ProofError: the process ended before it had collected the tests.
    """
    here = stand.root / f"run-{group.id}-{time.monotonic_ns()}"
    here.mkdir()
    kept, log = here / "finished.jsonl", here / "log"
    began = time.monotonic()
    (here / "tmp").mkdir()
    port = _free_port()
    with contextlib.ExitStack() as others:
        for rank in range(1, stand.ranks):
            command, env = _process(group, stand, here, rank, port)
            others.enter_context(running(command, env, stand.root, here / f"log-{rank}"))
        command, env = _process(group, stand, here, 0, port)
        code = waited(command, env, stand.root, log, stand.limit_s + LATE_S)
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    if not any("collected" in each for each in lines):
        end = "\n".join(log.read_text(errors="replace").rstrip().splitlines()[-LINES:])
        how = "did not begin in time" if code is None else f"ended with {_named(code)}"
        raise ProofError(f"pytest of {group.title} {how}:\n{end}")
    return {**ended(lines, code), "seconds": round(time.monotonic() - began, 1)}


def ended(lines: Sequence[Found], code: int | None) -> Found:
    """Return the outcomes of tests from the lines of `launchers/finished.py`, whole or cut off.

    Args:
        lines: in their order.
        code: with which the process ended by itself; None where its time was over.

    Returns:
        Tests by outcome and file, failures by their error, too; `cut`, the one in which the process ended, which has failed unless only time was over; those that are
        behind it as `unreached`; and `stopped`, which is None, `limit`, or how the process ended.
    """
    outcomes: dict[str, End] = {}
    left_out: dict[str, str] = {}
    collected: list[str] = []
    running: str | None = None
    stopped = "limit" if code is None else _named(code)
    audit: list[Found] | None = None
    for line in lines:
        if "left_out" in line:
            left_out[line["left_out"]] = line["why"]
        elif "collected" in line:
            collected = line["collected"]
        elif "began" in line:
            running = line["began"]
        elif "ended" in line:
            outcomes[line["ended"]] = End(line["outcome"], line["error"])
            running = None
        elif "stopped" in line:
            stopped, audit = line["stopped"], line["audit"]
    if running is not None and code is not None:
        outcomes[running] = End("failed", f"the process ended in it: {_named(code)}")
    errors = sorted({end.error for end in outcomes.values() if end.kind == "failed"})
    found: Found = {
        "passed": by_file(name for name, end in outcomes.items() if end.kind == "passed"),
        "failed": {
            each: by_file(name for name, end in outcomes.items() if end == End("failed", each)) for each in errors
        },
        "skipped": by_file(name for name, end in outcomes.items() if end.kind == "skipped"),
        "unreached": by_file(name for name in collected if name not in outcomes and name != running),
        "left_out": left_out,
        "cut": running,
        "stopped": stopped,
    }
    if audit is not None:
        found["calls"] = calls(audit)
        found["conflicts"] = [each["id"] for each in audit if each["decision"] == "conflict"]
    return found


def _process(group: Group, stand: Stand, here: Path, rank: int, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of one rank. Only the outcomes of the first rank count."""
    own = here / "tmp" / str(rank)
    own.mkdir()
    env = {
        **stand.env,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(stand.ranks),
        "TMPDIR": str(here / "tmp"),
        "PROOF_FINISHED": str(here / ("finished.jsonl" if rank == 0 else f"finished-{rank}.jsonl")),
        "PROOF_SECONDS": str(stand.limit_s),
    }
    base = here / "tmp" / "tests" if stand.ranks == 1 else own / "tests"
    words = [*(RUN if stand.armed else ()), *PYTEST, f"--basetemp={base}", *_chosen(group, stand.root)]
    return [sys.executable, "-W", "ignore", *words], variables(env, [*stand.path, stand.root, LAUNCHERS])


def _free_port() -> int:
    """Return a port for the meeting of one world.

    Ports that a system hands out by itself lie higher: one of those could be another process's by the time it is wanted.
    """
    for port in _PORTS:
        with socket.socket() as free:
            if free.connect_ex(("127.0.0.1", port)):
                return port
    raise ProofError("there is no free port between 21000 and 29000")  # the numbers never end


def _chosen(group: Group, root: Path) -> list[str]:
    """Return the words that choose the tests of a group that this checkout has."""
    there = [path for path in group.paths if (root / path).exists()]
    return [*(f"--deselect={FOLDER}/{test}" for test in group.but), *there]


@contextlib.contextmanager
def running(command: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in the block; end it, and all that it started, behind it."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=env, cwd=cwd, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # tests leave workers behind
            process.wait()


def waited(command: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path, limit_s: float) -> int | None:
    """Return the exit code of a command, or None where it, and all that it started, had to be ended."""
    with running(command, env, cwd, log) as process:
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None


def _named(code: int) -> str:
    """Return a way of ending in words."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
