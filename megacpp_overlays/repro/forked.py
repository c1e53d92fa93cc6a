"""Client of fork servers: processes of cases are copies of one that has imported torch, which is half of the cost of a small case.

A copy has the variables, the folder and the output of its job. Nothing of this package or of a target is imported before, unless the
job names it. Where no GPU is seen the copy runs eagerly: results of `torch.compile` on a CPU are the same but for rounding, and cost a
C++ compiler up to a minute.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import megacpp_overlays
from megacpp_overlays import variables
from megacpp_overlays.repro import fork_server, process_group

MODULES = (
    "torch",
    "triton.language",
    "setuptools",
    "einops",
    "yaml",
    "packaging.version",
    "wrapt",
    "importlib_metadata",
)
"""Dependencies of Megatron; none is a target of an overlay."""
MORE_MODULES = ("torch._dynamo", "torch.distributed.checkpoint")
"""Other dependencies of Megatron that take long to import."""
MORE_MODULES_ON_CPU = (
    *MORE_MODULES,
    "torch._inductor.compile_fx",
    "torch.distributed._tensor.experimental",
    "torch.distributed.fsdp",
    "torch.utils.cpp_extension",
    fork_server.EAGER,
)
"""Modules of a process that sees no GPU, and the switch to eager mode. With a GPU some of them may ask CUDA for devices, and then no copy can use one."""
PRELOADED = frozenset({"torch"})
"""Distributions that these modules import and that have targets of overlays. Their cases run in copies that have `MODULES` alone."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""Variables of a process that sees no GPU."""


class ForkServers:
    """Fork servers, one for each environment, as a context manager that stops them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[tuple[frozenset[tuple[str, str]], tuple[str, ...]], _ForkServer] = {}

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
        loaded: Sequence[str] = (),
        bare: bool = False,
    ) -> str | None:
        """Run a module to its end in a copy of a server; return in words how it ended, or None when it ended well.

        Where no server with `loaded` can be copied, the copy has torch and dependencies alone. Where no server can be copied, a Python is started.

        Args:
            words: a module, and its arguments.
            folder: where it runs.
            environment: all of its variables.
            output: the file that gets its output.
            timeout: seconds after which it is ended.
            loaded: modules that the server has imported as far as possible, in this order. Where this package is among them, it has
                armed the process with the variables of the job.
            bare: whether nothing but `MODULES` may be imported before.
        """
        more = _more_modules(environment)
        for modules in [()] if bare else dict.fromkeys(((*more, *loaded), more)):
            server = self._server(environment, modules)
            if server is not None and server.problem is None:
                return server.run(words, folder, environment, output, timeout)
        return run_anew(words, folder=folder, environment=environment, output=output, timeout=timeout)

    def prepare(self, *, environment: Mapping[str, str], loaded: Sequence[str]) -> None:
        """Start the server with these modules, unless it was started; see `run`."""
        self._server(environment, (*_more_modules(environment), *loaded))

    def _server(self, environment: Mapping[str, str], modules: tuple[str, ...]) -> _ForkServer | None:
        """Return the server for an environment with these modules and `MODULES`; it may still be starting. None where this system has no `os.pidfd_open`."""
        if not hasattr(os, "pidfd_open"):
            return None
        more = _more_modules(environment)
        base = self._server(environment, more if modules != more else ()) if modules else None
        if base is not None and base.problem is not None:
            return None
        is_armed = megacpp_overlays.__name__ in modules
        inherited = {name: value for name, value in environment.items() if is_armed or not variables.is_ours(name)}
        key = frozenset(inherited.items()), modules
        with self._lock:
            if key not in self._servers:
                self._servers[key] = base.copy(inherited, modules) if base else _StartedForkServer(inherited)
            return self._servers[key]


def _more_modules(environment: Mapping[str, str]) -> tuple[str, ...]:
    return MORE_MODULES_ON_CPU if NO_GPU.items() <= environment.items() else MORE_MODULES


def run_anew(
    words: Sequence[str], *, folder: Path, environment: Mapping[str, str], output: Path, timeout: float
) -> str | None:
    """Run a module to its end in a Python of its own, in which `torch.compile` compiles; see `ForkServers.run`."""
    command = [sys.executable, "-m", *words]
    with output.open("wb") as stream:
        return process_group.run(command, folder=folder, environment=environment, output=stream, timeout=timeout)


class _ForkServer:
    """A fork server, which may still import its modules."""

    def __init__(self, control: socket.socket) -> None:
        self._socket = control
        self._starting = threading.Lock()

    @functools.cached_property
    def _said(self) -> str:
        with self._socket.makefile("r") as lines:
            return lines.readline()

    @property
    def problem(self) -> str | None:
        """Why no process can be copied, or None; waits until the server knows."""
        with self._starting:
            said = self._said
        return said.strip() or None if said.endswith("\n") else "it ended while it imported torch"

    def run(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str], output: Path, timeout: float
    ) -> str | None:
        """Run a module in a copy; see `ForkServers.run`."""
        with self._begin(
            {"words": [*words], "folder": str(folder), "environment": {**environment}, "output": str(output)}
        ) as ours:
            ours.settimeout(timeout)
            try:
                said = ours.recv(64)
            except TimeoutError:
                ours.shutdown(socket.SHUT_WR)  # its keeper ends it, and says so
                ours.settimeout(None)
                ours.recv(64)
                return process_group.too_long(timeout)
        return process_group.in_words(int(said)) if said else "was lost with the process that it is a copy of"

    def copy(self, environment: Mapping[str, str], modules: Sequence[str]) -> _ForkServer:
        """Return a server that is a copy of this one and imports modules as far as possible."""
        return _ForkServer(self._begin({"modules": [*modules], "environment": {**environment}}))

    def _begin(self, job: Mapping[str, object]) -> socket.socket:
        """Start a copy with a job, and return its socket."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"+"], [theirs.fileno()])
        ours.sendall(f"{json.dumps(job)}\n".encode())
        return ours

    def close(self) -> None:
        """End the server. A copy that still runs ends when its caller closes the connection."""
        self._socket.close()


class _StartedForkServer(_ForkServer):
    """A fork server that is a Python of its own."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - an interpreter, and a file of ours
                [sys.executable, fork_server.__file__, str(theirs.fileno()), *MODULES],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def close(self) -> None:
        """See `_ForkServer.close`; returns when the process has ended."""
        super().close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
