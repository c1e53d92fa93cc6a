"""The process that `warm_python` copies: `warm_server.py ADDRESS RUN MODULE...`.

It listens at ADDRESS, and ends with the process RUN, which is that of pytest.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hastened_interpreter import hasten

SIZE = struct.Struct("!I")
"""The header of a job: the size of its JSON in bytes."""


IDLE_S = 60
"""A server without a request for so long ends: the memory of a release of Megatron is half a GiB."""


def serve(address: str, pid: int, modules: Sequence[str]) -> None:
    """Import modules, then fork for each connection until a process has ended, or no request has come for IDLE_S."""
    run = os.pidfd_open(pid)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    for name in modules:
        importlib.import_module(name)
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton.language" in modules:
        hasten()
    del sys.path[0]  # the folder of this script
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for keepers
    ends = False
    while True:
        ready, _, _ = select.select([listener, run], [], [], 0 if ends else IDLE_S)
        if run in ready or (ends and not ready):
            break
        if not ready:  # a client that found the socket before it was removed is still served
            Path(address).unlink(missing_ok=True)
            ends = True
            continue
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.close(run)
            _keep(connection)
        connection.close()
    with contextlib.suppress(OSError):  # the last one takes the folder along
        Path(address).unlink(missing_ok=True)
        if ends is False:
            shutil.rmtree(Path(address).parent)


def _keep(connection: socket.socket) -> NoReturn:
    """Fork the process that was asked for, say which it is, wait for it, and say how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, streams, _, _ = socket.recv_fds(connection, SIZE.size, 3)
    size, received = SIZE.unpack(head)[0], b""
    while len(received) < size:
        received += connection.recv(size - len(received))
    pid = os.fork()
    if pid == 0:
        connection.close()
        for to, stream in enumerate(streams):
            os.dup2(stream, to)
        for stream in streams:
            os.close(stream)
        _become(json.loads(received))
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(job: dict[str, Any]) -> NoReturn:
    """Be the process that was asked for, to its end."""
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = 1
    try:
        _measure()
        _execute(job["words"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException as error:  # noqa: BLE001 - as an interpreter does
        traceback.print_exception(error.with_traceback(_of_the_job(error.__traceback__)))
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _of_the_job(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without the frames of this file at its head."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _measure() -> None:
    """Start coverage if the variables say so, as its file in site-packages does at the start of an interpreter."""
    if os.environ.get("COVERAGE_PROCESS_CONFIG") or os.environ.get("COVERAGE_PROCESS_START"):
        import coverage

        coverage.process_startup(force=True)


def _execute(words: list[str]) -> None:
    sys.orig_argv = [sys.executable, *words]
    if words[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        words = words[2:]
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    kind, *rest = words
    given = os.environ.get("PYTHONPATH")
    sys.path[:0] = given.split(os.pathsep) if given else []
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        text, name = rest[0], "<string>"
    elif kind.startswith("-"):
        raise ValueError(f"a copied process has no option {kind}: start a Python for it")
    else:
        sys.path.insert(0, str(Path(kind).resolve().parent))
        sys.argv = [kind, *rest]
        text, name = Path(kind).read_text(), kind
        main.__file__ = kind
    exec(compile(text, name, "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
