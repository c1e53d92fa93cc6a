"""A command in a process group of its own, so that nothing it started is left when it ends or takes too long."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeAlias

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
        grace: seconds that it then gets to end what it started in groups of their own.
    """
    process = subprocess.Popen(  # noqa: S603 - an interpreter, and files of ours
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        start_new_session=True,
    )
    with _nothing_left_of(process, grace):
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"took more than {timeout:g} seconds"
    if code < 0:
        return f"was killed by signal {-code} ({signal.strsignal(-code)})"
    return f"ended with exit code {code}" if code else None


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
