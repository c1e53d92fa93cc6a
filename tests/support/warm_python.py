"""A Python that has imported torch already and forks for each process that a test asks for.

Importing torch is most of the cost of a small process of these tests, and is the same in all of them. So one process
imports it, once for a run of pytest and each environment that torch reads at import, and a copy of it becomes each
process that is asked for: with the words, the variables, the folder and the streams of that process, a `__main__` and a
`sys.path` of its own, its coverage measured from its first line, and nothing of this project imported yet.

Tests that depend on the start of an interpreter, on torch being imported after this package, or on options other than
`-W ignore` start a Python of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

from places import measuring
from warm_server import SIZE

OF_EXTENSIONS = "TORCH_CUDA_ARCH_LIST"
"""A variable that torch reads when an upstream builds a library, and not before."""
AT_IMPORT = (
    "TRITON_INTERPRET",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "PYTHONHASHSEED",
    OF_EXTENSIONS,
)
"""Variables that torch, triton or Python itself reads once: processes that differ in them have no parent in common."""
TORCH = ("torch",)
TRITON = (*TORCH, "triton.language")
MEGATRON = (*TRITON, "torch._dynamo", "torch.distributed.checkpoint")
"""Modules to start after: torch, with Triton, and with all of torch that Megatron imports, which takes longest of all."""
UNCOMPILED = (*MEGATRON, "uncompiled")
"""The same where nothing that Megatron gives to `torch.compile` is compiled, which takes a C++ compiler up to a minute."""
INTERPRETER, MEGATRON_INTERPRETED = ((*each, "unchecked_sums") for each in (TRITON, UNCOMPILED))
"""With Triton, or with that as well, for kernels that are interpreted."""
ARMED = "megacpp_overlays"
"""Among the modules to start after, it arms the process that is copied: after torch, with the switches of the processes."""
SERVER = Path(__file__).with_name("warm_server.py")
_asking = threading.RLock()
_servers: list[int] = []
"""Process ids of the servers that this process has started; a run with several workers shares them."""


class WarmProcess:
    """A process that was forked for a test. Another process is its parent, and tells how it ended."""

    def __init__(self, connection: socket.socket, *written: IO[bytes]) -> None:
        self._said = connection.makefile("r")
        self._written = written
        self._read: list[str] = []
        connection.close()
        pid = self._said.readline()
        if not pid:
            raise RuntimeError("the process to copy has ended: see its error above")
        self.pid = int(pid)
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code, negative for a signal. `timeout` in seconds ends it and this test."""
        if self.returncode is None:
            if not select.select([self._said], [], [], timeout)[0]:
                self.kill()
                raise subprocess.TimeoutExpired("a forked process", timeout or 0)
            self.returncode = int(self._said.readline())
            self._said.close()
            for each in self._written:
                each.seek(0)
                self._read.append(each.read().decode())
                each.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end and return its output and its error output, where these are kept."""
        self.wait(timeout)
        out, error = self._read
        return out, error

    def leave(self) -> None:
        """Close the connection. The process runs on, and its exit code is not read."""
        self._said.close()

    def kill(self) -> None:
        """End it, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def start(
    words: Sequence[str | Path],
    env: Mapping[str, str],
    *,
    after: tuple[str, ...] = TORCH,
    cwd: Path | None = None,
    python: str | Path = sys.executable,
    path: tuple[str, ...] = (),
) -> WarmProcess:
    """Start `python *words` in a copy of a process that has imported some modules; keep its output.

    Args:
        words: `-c CODE`, `-m MODULE` or a script, with its arguments, after `-W ignore` or nothing.
        env: all its variables.
        after: the modules.
        cwd: the folder where it starts.
        python: the interpreter, such as that of another lane.
        path: folders where the modules are looked for first.
    """
    out, error = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 - read by WarmProcess.wait
    with open(os.devnull, "rb") as nothing:
        streams = (nothing.fileno(), out.fileno(), error.fileno())
        measured = measuring() if str(python) == sys.executable else {}  # other lanes have no coverage.py
        connection = _ask_server(lambda: address(env, after, python, path), words, {**measured, **env}, cwd, streams)
        return WarmProcess(connection, out, error)


def address(
    env: Mapping[str, str],
    after: tuple[str, ...] = TORCH,
    python: str | Path = sys.executable,
    path: tuple[str, ...] = (),
) -> str:
    """Return the address of the process of which a process with these variables would be a copy.

    `warm_python.py ADDRESS WORDS...` starts one and ends as it does: for launchers that start commands.
    """
    names = [*AT_IMPORT, *(sorted(filter(_is_ours, env)) if ARMED in after else ())]
    variables = {name: env[name] for name in names if name in env}
    if path:
        variables["PYTHONPATH"] = os.pathsep.join(path)
    return _server(str(python), after, variables)


def _is_ours(name: str) -> bool:
    """Return whether a variable is of this package, which is not imported here: it would arm."""
    return name.startswith("MEGACPP_")


def _ask_server(
    address_of: Callable[[], str],
    words: Sequence[str | Path],
    env: Mapping[str, str],
    cwd: Path | None,
    streams: tuple[int, int, int],
) -> socket.socket:
    """Ask a server for a process, see `_ask`. One that was idle for too long has ended; the next address is of a new one."""
    try:
        return _ask(address_of(), words, env, cwd, streams)
    except (ConnectionError, FileNotFoundError):
        return _ask(address_of(), words, env, cwd, streams)


def _ask(
    at: str, words: Sequence[str | Path], env: Mapping[str, str], cwd: Path | None, streams: tuple[int, int, int]
) -> socket.socket:
    """Return the connection over which a process that was asked for says which it is and how it ended.

    Raises:
        ConnectionError: the server has ended.
        FileNotFoundError: the same.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(at)
        job = {"words": [str(word) for word in words], "env": dict(env), "cwd": str(cwd or Path.cwd())}
        raw = json.dumps(job).encode()
        socket.send_fds(connection, [SIZE.pack(len(raw))], streams)
        connection.sendall(raw)
    except OSError:
        connection.close()
        Path(at).unlink(missing_ok=True)  # the next who asks starts another
        raise
    return connection


def run(
    words: Sequence[str | Path],
    env: Mapping[str, str],
    *,
    after: tuple[str, ...] = TORCH,
    cwd: Path | None = None,
    timeout: float | None = None,
    path: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run `python *words` to its end, see `start`, and return its exit code and its output."""
    started = start(words, env, after=after, cwd=cwd, path=path)
    out, error = started.communicate(timeout)
    return subprocess.CompletedProcess(list(words), started.wait(), out, error)


def _server(python: str, modules: tuple[str, ...], variables: Mapping[str, str]) -> str:
    """Return the address of a server; start it unless a worker of this run of pytest has done so.

    A server exits with the run of pytest, or after `warm_server.IDLE_S` without a connection. It removes its socket first.
    """
    key = hashlib.sha256(json.dumps([python, modules, sorted(variables.items())]).encode()).hexdigest()[:16]
    folder = _folder()
    address = folder / key
    with _asking, open(folder / f"{key}.lock", "w") as lock:  # tests ask from several threads, and from several workers
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            _serve(address, python, modules, variables)
    return str(address)


@functools.cache
def _folder() -> Path:
    """Return a folder for the sockets of a run of pytest. Its last process removes it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        made = Path(tempfile.mkdtemp(prefix="warm-"))
        atexit.register(_end_servers)
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        return made
    shared = Path(tempfile.gettempdir()) / f"warm-{run}"
    shared.mkdir(mode=0o700, exist_ok=True)
    return shared


def _serve(address: Path, python: str, modules: tuple[str, ...], variables: Mapping[str, str]) -> None:
    """Start a server at an address: a copy of one that has imported most of its modules, where there are such."""
    of_run = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    base = next((each for each in (UNCOMPILED, MEGATRON, TRITON, TORCH) if {*each} < {*modules}), ())
    rest = [each for each in modules if each not in base]
    words = [SERVER, address, str(of_run), *rest]
    inherited = {name: value for name, value in os.environ.items() if not _is_ours(name)}
    env = {name: value for name, value in inherited.items() if name not in {"PYTHONPATH", *AT_IMPORT}} | variables
    if base:
        before = {name: value for name, value in variables.items() if name in AT_IMPORT and name != OF_EXTENSIONS}
        with open(os.devnull, "r+b") as nothing:
            streams = (nothing.fileno(), nothing.fileno(), 2)
            started = WarmProcess(_ask_server(lambda: _server(python, base, before), words, env, None, streams))
        started.leave()
        _servers.append(started.pid)
    else:
        silent = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in (0, 1)]
        _servers.append(os.posix_spawn(python, [python, *map(str, words)], env, file_actions=silent))
    while not address.exists():  # it is there before anything is imported
        if not _is_running(_servers[-1]):
            raise RuntimeError("the process to copy has ended: see its error above")
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    except ChildProcessError:  # another one started it, and waits for it
        return Path(f"/proc/{pid}").exists()


def _end_servers() -> None:
    for each in _servers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _stand_in(at: str, words: Sequence[str]) -> NoReturn:
    """Start a process with our variables and streams, pass SIGTERM on to it, and end as it does."""
    started = WarmProcess(_ask(at, words, os.environ, None, (0, 1, 2)))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(started.pid, signal.SIGTERM))
    code = started.wait()
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    _stand_in(sys.argv[1], sys.argv[2:])
