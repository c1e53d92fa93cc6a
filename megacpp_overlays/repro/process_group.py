"""Runner of a command in a process group of its own, so that no child of it is left when it ends or takes too long."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeAlias

_WATCH = 'read -r group && { read -r rest; kill -s KILL -- "-$group"; }'
"""Shell script that reads a line with a process group and kills the group at the end of the file: when the writer has ended."""

Stream: TypeAlias = "int | IO[str] | IO[bytes]"


def run(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    output: Stream,
    errors: Stream = subprocess.STDOUT,
    timeout: float,
    grace: float = 0.0,
) -> str | None:
    """Run a command to its end; return in words how it ended, or None when it ended well.

    Args:
        command: program and arguments.
        folder: where it runs.
        environment: all of its variables.
        output: where stdout goes.
        errors: where stderr goes.
        timeout: seconds after which it is ended.
        grace: seconds that it then gets to end its children in groups of their own.
    """
    with _ended_with_us() as tell:
        return _run(command, folder, environment, (output, errors), timeout, grace, tell)


def _run(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    streams: tuple[Stream, Stream],
    timeout: float,
    grace: float,
    tell: Callable[[int], None],
) -> str | None:
    process = subprocess.Popen(  # noqa: S603 - an interpreter, and files of ours
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=streams[0],
        stderr=streams[1],
        start_new_session=True,
    )
    tell(process.pid)
    with _nothing_left_of(process, grace):
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return too_long(timeout)
    return in_words(code)


def in_words(code: int) -> str | None:
    """Return how a process ended by its exit code, which is negative for a signal; None where it ended well."""
    if code < 0:
        return f"was killed by signal {-code} ({signal.strsignal(-code)})"
    return f"ended with exit code {code}" if code else None


def too_long(timeout: float) -> str:
    """Return the text for a process that was ended after so many seconds."""
    return f"took more than {timeout:g} seconds"


@contextlib.contextmanager
def _ended_with_us() -> Iterator[Callable[[int], None]]:
    """Start a watcher that kills a process group when this process is gone, also by SIGKILL; yield the function that names the group.

    The watcher is a shell that reads from a pipe, which ends when its last writer is gone. The parent-death signal of Linux
    would end the first process of the group alone, and needs code to run between fork and exec.
    """
    ours, theirs = os.pipe()[::-1]
    try:
        watcher = subprocess.Popen(  # noqa: S603 - a text of ours
            ["/bin/sh", "-c", _WATCH],
            cwd="/",
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:  # no shell, no watcher: all other ways to end are handled here
        watcher = None
    finally:
        os.close(theirs)

    def tell(group: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(ours, b"%d\n" % group)

    try:
        yield tell if watcher else lambda group: None
    finally:
        if watcher is not None:
            watcher.kill()  # before the pipe ends
            watcher.wait()
        os.close(ours)


@contextlib.contextmanager
def _nothing_left_of(process: subprocess.Popen[bytes], grace: float) -> Iterator[None]:
    try:
        yield
    finally:
        if grace and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
