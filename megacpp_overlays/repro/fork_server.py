"""Fork server for cases: a Python that has imported torch and is forked for each case; `fork_server.py DESCRIPTOR MODULE...`.

The client is `repro.forked`. DESCRIPTOR is one end of a socket pair. First the server writes a line, which is empty where it can
serve and gives the reason otherwise. Then the client sends a socket with each byte. From that socket the server reads one job as a
line of JSON, and to it the server writes the exit code of the job's process. A job whose socket is closed early is killed with its
process group. The server ends with its own socket, however the client ends. A job may also be a list of modules: then the copy imports
them as far as possible and becomes a server itself, with that socket as its control.

The file is run by its path. It imports nothing of this package, whose import arms a process, unless a job names the package.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

PACKAGE = "megacpp_overlays"
EAGER = "eager"
"""Name among the modules that makes `torch.compile` run functions eagerly, as they are written."""


def serve(control: socket.socket, problem: str) -> None:
    """Write why this process cannot be copied, or an empty line; where it can be, fork for each socket that arrives until the client is gone."""
    gc.collect()  # otherwise the first full collection of each copy goes through the imported modules
    control.sendall(f"{problem}\n".encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    while not problem:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        connection = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            control.close()
            _keep(connection)
        connection.close()


def _prepare(modules: Sequence[str]) -> str:
    """Import the modules that are installed; return why this process cannot be copied, or an empty text."""
    try:
        for name in modules:
            with contextlib.suppress(ModuleNotFoundError):
                _import(name)
    except Exception as error:  # noqa: BLE001 - upstream may fail in any way, and a case that imports it says more
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    if PACKAGE in sys.modules:
        return f"{PACKAGE} is imported at the start of this Python, with the settings of that moment"
    return _threads()


def _load(names: Sequence[str]) -> str:
    """Import modules as far as possible; return why this process cannot be copied afterwards, or an empty text."""
    for name in names:
        with contextlib.suppress(Exception):  # a case that needs it says more
            _import(name)
    return _threads()


def _threads() -> str:
    return "there are threads, which no copy has" if threading.active_count() > 1 else ""


def _import(name: str) -> None:
    if name == EAGER:
        importlib.import_module("torch").compiler.set_stance("force_eager")
    else:
        importlib.import_module(name)


def _keep(connection: socket.socket) -> NoReturn:
    """Fork the process of a job, wait for it or for the end of the client, and write its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection.makefile("r") as lines:
        job = json.loads(lines.readline() or "null")
    if job is None:
        os._exit(0)
    if "modules" in job:
        _set_environment(job)
        serve(connection, _load(job["modules"]))
        os._exit(0)
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become(job)
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, connection.fileno()], [], [])[0]:
        os.kill(pid, signal.SIGKILL)  # it may have no group yet
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _set_environment(job: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(job["environment"])


def _become(job: dict[str, Any]) -> NoReturn:
    """Run the module of a job as `python -m` does, to the end of this process."""
    code = 1
    try:
        os.setsid()
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for stream, descriptor in enumerate((nothing, output, output)):
            os.dup2(descriptor, stream)
        os.chdir(job["folder"])
        _set_environment(job)
        sys.path.insert(0, job["folder"])
        sys.argv = job["words"]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, whose modules are of this package
    serve(socket.socket(fileno=int(sys.argv[1])), _prepare(sys.argv[2:]))
