"""Processes of cases that are copies of one which has imported torch: half of what a small case costs is that import.

A copy has the variables, the folder and the output of its job, and nothing of this package is imported before. Where no GPU is seen
it runs eagerly: what `torch.compile` makes on a CPU is the same but for rounding, and costs a C++ compiler up to a minute.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from megacpp_overlays import variables
from megacpp_overlays.repro import fork_server, process_group

MODULES = ("torch", "torch._dynamo", "torch.distributed.checkpoint", "triton.language")
"""Dependencies of Megatron that take longest to import. No overlay has one of them as its target."""
MODULES_ON_CPU = (
    *MODULES,
    "torch._inductor.compile_fx",
    "torch.distributed._tensor.experimental",
    "torch.distributed.fsdp",
    "torch.utils.cpp_extension",
    "setuptools",
    "einops",
    "yaml",
    "packaging.version",
    "wrapt",
    "importlib_metadata",
    fork_server.EAGER,
)
"""Those of a process that sees no GPU, and what makes it run eagerly. With a GPU some of them may ask CUDA for devices, and then no copy can use one."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""Variables of a process that sees no GPU."""


class ForkServers:
    """Fork servers, one for each environment; a context, at whose end they end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[frozenset[tuple[str, str]], _ForkServer] = {}

    def __enter__(self) -> ForkServers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._servers.values():
            each.close()

    def run(
        self,
        words: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        output: Path,
        timeout: float,
    ) -> str | None:
        """Run a module to its end in a copy of a server; return in words how it ended, or None when it ended well.

        Where this system, or this environment, has no process that can be copied, a Python is started.

        Args:
            words: a module, and its arguments.
            folder: where it runs.
            environment: all of its variables.
            output: the file that gets what it writes.
            timeout: seconds after which it is ended.
        """
        server = self._server(environment)
        if server is not None and server.problem is None:
            return server.run(words, folder, environment, output, timeout)
        return run_anew(words, folder=folder, environment=environment, output=output, timeout=timeout)

    def _server(self, environment: Mapping[str, str]) -> _ForkServer | None:
        if not hasattr(os, "pidfd_open"):
            return None
        inherited = {name: value for name, value in environment.items() if not variables.is_ours(name)}
        key = frozenset(inherited.items())
        with self._lock:
            if key not in self._servers:
                modules = MODULES_ON_CPU if NO_GPU.items() <= inherited.items() else MODULES
                self._servers[key] = _ForkServer(inherited, modules)
            return self._servers[key]


def run_anew(
    words: Sequence[str], *, folder: Path, environment: Mapping[str, str], output: Path, timeout: float
) -> str | None:
    """Run a module to its end in a Python of its own, which compiles what upstream has compiled; see `ForkServers.run`."""
    command = [sys.executable, "-m", *words]
    with output.open("wb") as stream:
        return process_group.run(command, folder=folder, environment=environment, output=stream, timeout=timeout)


class _ForkServer:
    """A running fork server."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - an interpreter, and a file of ours
                [sys.executable, fork_server.__file__, str(theirs.fileno()), *modules],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        with self._socket.makefile("r") as lines:
            said = lines.readline()
        self.problem = said.strip() or None if said.endswith("\n") else "it ended while it imported torch"
        """Why no process can be copied, or None."""

    def run(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str], output: Path, timeout: float
    ) -> str | None:
        """Run a module in a copy; see `ForkServers.run`."""
        job = {"words": [*words], "folder": str(folder), "environment": {**environment}, "output": str(output)}
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(self._socket, [b"+"], [theirs.fileno()])
            ours.sendall(f"{json.dumps(job)}\n".encode())
            ours.settimeout(timeout)
            try:
                said = ours.recv(64)
            except TimeoutError:
                ours.shutdown(socket.SHUT_WR)  # its keeper ends it, and says so
                ours.settimeout(None)
                ours.recv(64)
                return process_group.too_long(timeout)
        return process_group.in_words(int(said)) if said else "was lost with the process that it is a copy of"

    def close(self) -> None:
        """End the server. A copy that still runs ends when its caller closes the connection."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
