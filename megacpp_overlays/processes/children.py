"""Arming of child processes, and checks of the overlays that each of them runs.

A forked child inherits the seams of its parent. A child that is executed anew has none, unless it imports this package.
`reach_children` puts a folder in front of PYTHONPATH whose `sitecustomize` arms every
Python of this environment before its first line, and leaves the Pythons of other environments alone. Python reads
neither PYTHONPATH nor `sitecustomize` under -I, -E or -S: such a child is not reached, and `demand` says so.

The statement of each child is a receipt, see `child_reports`.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

from megacpp_overlays import terminal_text
from megacpp_overlays.errors import ChildrenError
from megacpp_overlays.loader.session import current
from megacpp_overlays.loader.settings import CHILDREN, RECEIPTS, Mode, this_environment
from megacpp_overlays.loader.statement import Statement
from megacpp_overlays.model import Decision
from megacpp_overlays.processes import differences
from megacpp_overlays.processes.child_reports import (
    NOT_READ,
    Receipt,
    is_alike,
    is_history,
    life_of,
    own_statement,
    read_receipts,
    stop_writing_receipts,
    this_host,
    this_life,
    write_receipts,
)
from megacpp_overlays.processes.differences import Difference, StatementGroup
from megacpp_overlays.variables import is_ours

STARTUP = str(Path(__file__).absolute().with_name("startup"))
"""The folder that PYTHONPATH leads to."""

_OF_DECLARATION = ("variable", "overlay_sha256")
"""Keys of a decision that say the same before and after the import of its target."""

_PATH = "PYTHONPATH"
_POLL_SECONDS = 0.02

Process: TypeAlias = "int | BaseProcess | subprocess.Popen[Any]"
"""A child: its process id, or the object that it was started with."""


# --- the environment ------------------------------------------------------------------------------------------


def child_environment() -> dict[str, str]:
    """Return the variables with which a Python of this environment arms at start-up, in the state of this process.

    For launchers of workers that take a dictionary instead of inheriting the environment. The variables are
    PYTHONPATH, the name of this environment, and every setting of ours that is set here.

    Raises:
        ChildrenError: this package lies in a folder that PYTHONPATH cannot name.
    """
    if os.pathsep in STARTUP:
        raise ChildrenError(f"{STARTUP} has a {os.pathsep!r} in its name, so PYTHONPATH cannot lead to it: move it")
    ours = {name: value for name, value in os.environ.items() if is_ours(name)}
    return {**ours, _PATH: _with_startup(os.environ.get(_PATH, "")), CHILDREN: this_environment()}


def _with_startup(path: str) -> str:
    return os.pathsep.join([STARTUP, *_others(path)])


def _others(path: str) -> list[str]:
    # An empty entry is the current folder; an empty variable is no entry at all.
    return [entry for entry in path.split(os.pathsep) if entry != STARTUP] if path else []


def reach_children(receipts: bool | str | os.PathLike[str] = False) -> Children:
    """Arm every Python child of this environment that is started from now on, and theirs, before its first line.

    Args:
        receipts: the folder for the receipts of children. It is made if it is missing. True: a new temporary folder, which
            is removed when the handle is closed. False: the folder that the parent of this process named, if any.

    Returns:
        A handle that undoes it, and that reads and demands receipts.

    Raises:
        SettingsError: the folder cannot be written.
        ChildrenError: this package lies in a folder that PYTHONPATH cannot name.
    """
    return Children(receipts)


class Children:
    """The children that were started while this was open. Also a context manager."""

    def __init__(self, receipts: bool | str | os.PathLike[str] = False) -> None:
        variables = child_environment()
        self._pid = os.getpid()
        self._opened = time.time()
        self._is_fresh = receipts is True
        if receipts is True:
            variables[RECEIPTS] = tempfile.mkdtemp(prefix="megacpp_overlays-")
        elif receipts:
            variables[RECEIPTS] = os.path.abspath(receipts)
        self.folder = Path(variables[RECEIPTS]) if variables.get(RECEIPTS) else None
        """Folder of the receipts; None when no receipts were requested."""
        if self._is_fresh:
            atexit.register(self._remove_folder)
        if self.folder is not None:
            write_receipts(current(), self.folder)
        self._variables = {name: variables[name] for name in (_PATH, CHILDREN, RECEIPTS) if name in variables}
        self._before = {name: os.environ.get(name) for name in self._variables}
        os.environ.update(self._variables)
        # Some libraries pass `sys.path` to their workers as PYTHONPATH: Inductor does. The entry is where Python would put it.
        self._on_path = STARTUP not in sys.path
        if self._on_path:
            sys.path.insert(1, STARTUP)
        _handles.append(self)

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Reach no further child. Those that were started stay armed. Closing twice is closing once."""
        if self not in _handles:
            return
        later = _handles[_handles.index(self) + 1 :]
        _handles.remove(self)
        if later:  # the next handle restores the variables that this one found
            later[0]._take_over(self)  # noqa: SLF001
        else:
            for name, value in self._before.items():
                self._put_back(name, value)
            if self._on_path and STARTUP in sys.path:
                sys.path.remove(STARTUP)
        if self.folder is not None and self.folder not in {other.folder for other in _handles}:
            stop_writing_receipts(self.folder)
        self._remove_folder()

    def _take_over(self, closed: Children) -> None:
        self._before.update(closed._before)
        self._on_path = self._on_path or closed._on_path
        if self.folder == closed.folder:
            self._is_fresh, closed._is_fresh = closed._is_fresh, False
            atexit.unregister(closed._remove_folder)
            atexit.register(self._remove_folder)

    def _put_back(self, name: str, value: str | None) -> None:
        now = os.environ.get(name)
        if now != self._variables.get(name):  # other code changed the variable after this handle: keep that value
            if name != _PATH or now is None or STARTUP in (value or "").split(os.pathsep):
                return
            value = os.pathsep.join(_others(now))
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    def _remove_folder(self) -> None:
        if self._is_fresh and self.folder is not None and os.getpid() == self._pid:
            atexit.unregister(self._remove_folder)
            _remove_shared(self.folder)

    def receipts(self) -> tuple[Receipt, ...]:
        """Return the newest receipt of every process that gave one, ended ones too, this one left out; by process id.

        Raises:
            ChildrenError: receipts were not asked for.
        """
        newest: dict[object, Receipt] = {}
        for receipt in sorted(read_receipts(self._receipts_folder().glob("*.json")), key=lambda receipt: receipt.given):
            if receipt.given >= self._opened and not is_history(receipt):
                newest[receipt.host, receipt.pid, receipt.start] = receipt
        newest.pop((this_host(), os.getpid(), this_life().start), None)
        return tuple(sorted(newest.values(), key=lambda receipt: (receipt.host, receipt.pid)))

    def demand(self, processes: Iterable[Process] | None = None, timeout: float = 30.0) -> tuple[Receipt, ...]:
        """Return the receipts of children that run the code of this process, or raise.

        A target that a child has not imported yet is no difference. Settings, and decisions on targets that both processes have
        imported, are compared.

        Args:
            processes: process ids or objects of `multiprocessing` or `subprocess`, all on this host; without it,
                every live child that `multiprocessing` knows of, workers of pools and data loaders among them.
            timeout: how many seconds a child may take to give its receipt.

        Raises:
            ChildrenError: names each child without a receipt, and each difference with the processes that hold each value.
                It gives advice on each.
        """
        folder = self._receipts_folder()
        given = list(multiprocessing.active_children() if processes is None else processes)
        asked = [_ChildProcess.of(process) for process in given]
        found = _await_receipts(folder, asked, time.monotonic() + timeout)
        silent = [each for each in asked if each not in found]
        here = StatementGroup(own_statement(current()), (f"this process ({os.getpid()})",))
        groups = [here, *(StatementGroup(receipt.statement, (str(each),)) for each, receipt in found.items())]
        differing = differences.find(_with_settled_decisions(groups))
        if silent or differing:
            raise ChildrenError(_report(silent, differing, len(asked), timeout))
        return tuple(found[each] for each in asked)

    def _receipts_folder(self) -> Path:
        if self.folder is None:
            raise ChildrenError("no receipts were asked for: call reach_children(receipts=True), or name a folder")
        return self.folder


def _remove_shared(folder: Path) -> None:
    """Remove a folder that live children may be writing to; a folder that is gone is no error.

    It is renamed first: a child that writes while the files are deleted finds no folder by its name, so it leaves no file
    that would keep the folder.
    """
    with contextlib.suppress(OSError):
        folder = folder.rename(folder.with_name(f"{folder.name}.closed"))
    shutil.rmtree(folder, ignore_errors=True)


_handles: list[Children] = []


# --- demanding receipts ---------------------------------------------------------------------------------------


class _ChildProcess(NamedTuple):
    """Child process whose receipt is demanded."""

    pid: int
    what: str
    process: Process

    @classmethod
    def of(cls, process: Process) -> _ChildProcess:
        if isinstance(process, int):
            return cls(process, " ".join(_proc_words(process, "cmdline") or ["no such process"]), process)
        if process.pid is None:
            raise ChildrenError(f"{process!r} has not been started: demand its receipt afterwards")
        if isinstance(process, BaseProcess):
            return cls(process.pid, process.name, process)
        words = (
            process.args if isinstance(process.args, str | bytes | os.PathLike) else " ".join(map(str, process.args))
        )
        return cls(process.pid, str(words), process)

    def __str__(self) -> str:
        return terminal_text.one_line(f"{self.pid} ({self.what if len(self.what) <= 60 else self.what[:57] + '...'})")

    def __hash__(self) -> int:
        return self.pid

    def exit_code(self) -> int | None:
        """Return the exit code of the child; None while it runs, or when only its real parent knows."""
        if isinstance(self.process, BaseProcess):
            return self.process.exitcode
        return None if isinstance(self.process, int) else self.process.poll()

    def has_ended(self) -> bool:
        if self.exit_code() is not None:
            return True
        life = life_of(self.pid)
        return life.state in "ZX" if life else Path("/proc/self/stat").exists()

    def receipt(self, folder: Path) -> Receipt | None:
        """Return the child's newest receipt, never that of another process or of another program in the same process."""
        life = life_of(self.pid)
        candidates = [r for r in read_receipts(folder.glob(f"{self.pid}-*.json")) if r.host == this_host()]
        if life is not None:
            candidates = [r for r in candidates if r.start == life.start and is_alike(r.image, life.image)]
        if not isinstance(self.process, int | BaseProcess):  # a Popen child was executed, not forked
            candidates = [r for r in candidates if r.started == "exec"]
        return max(candidates, key=lambda receipt: receipt.given, default=None)


def _await_receipts(folder: Path, asked: Sequence[_ChildProcess], until: float) -> dict[_ChildProcess, Receipt]:
    """Return the receipts that arrive in time. A process that has ended is not waited for."""
    found: dict[_ChildProcess, Receipt] = {}
    while True:
        ended = [each for each in asked if each.has_ended()]  # before looking: it may give one and end at once
        found = {each: receipt for each in asked if (receipt := each.receipt(folder))}
        if all(each in found or each in ended for each in asked) or time.monotonic() >= until:
            return found
        time.sleep(_POLL_SECONDS)


def _with_settled_decisions(groups: Sequence[StatementGroup]) -> list[StatementGroup]:
    """Return the groups with each decision that still waits for an import replaced by the first settled decision.

    This process is the first group, so its settled decisions are preferred.
    """
    settled: dict[Any, tuple[Statement, Mapping[str, Any]]] = {}
    for group in groups:
        for each in group.statement["decisions"]:
            if not _waits(each):
                settled.setdefault((each["id"], each["target"]), (group.statement, each))

    def with_settled(each: Mapping[str, Any], own: Statement) -> Mapping[str, Any]:
        theirs, known = settled.get((each["id"], each["target"]), (own, each))
        if not _waits(each):
            return each
        kept: tuple[str, ...] = _OF_DECLARATION
        if _was_undone(each, own) != _was_undone(known, theirs):
            kept = (*kept, "decision", "reason")
        return {**known, **{name: each[name] for name in kept if name in each}}

    return [
        group._replace(
            statement={
                **group.statement,
                "decisions": [with_settled(d, group.statement) for d in group.statement["decisions"]],
            }
        )
        for group in groups
    ]


def _waits(decision: Mapping[str, Any]) -> bool:
    return bool(decision["source_sha256"] == NOT_READ)


def _was_undone(decision: Mapping[str, Any], own: Statement) -> bool:
    """Return whether a decision is off by a call of `undo`, which does not reach children, and not by a setting."""
    by_mode = own["mode"] in {Mode.OFF.value, Mode.OBSERVE.value}
    return decision["decision"] == Decision.DISABLED.value and not by_mode and decision["id"] not in own["off"]


def _report(silent: Sequence[_ChildProcess], differing: Sequence[Difference], asked: int, timeout: float) -> str:
    """Return the error text about silent and differing children, for the log of their parent."""
    parts = []
    if silent:
        head = f"{len(silent)} of {asked} child processes gave no receipt within {timeout:g} s:"
        parts.append("\n".join([head, *(f"- {each}: {_why_silent(each)}" for each in silent)]))
    if differing:
        advice = differences.advice(differing)
        if any("undone in" in text for difference in differing for text, _ in difference.values):
            advice.append(
                "`undo` in one process does not undo an overlay in others: switch it off with its variable instead"
            )
        parts += ["Child processes do not run the code of this process:", differences.table(differing, "processes")]
        parts.append("\n".join(["What to do:", *(f"- {line}" for line in advice)]))
    return "\n\n".join(parts)


def _why_silent(asked: _ChildProcess) -> str:
    if asked.has_ended():
        code = asked.exit_code()
        how = "" if code is None else f" with {code}"
        return f"it has ended{how}; if it is a Python, look at its stderr"
    words = _proc_words(asked.pid, "environ")
    hand_over = "start it after reach_children(), or hand it child_environment()"
    if words is not None:
        variables = dict(word.partition("=")[::2] for word in words)
        if variables.get(CHILDREN) != this_environment():
            return f"it was started without {CHILDREN}, or by a process (a fork server?) that was; {hand_over}"
        if STARTUP not in variables.get(_PATH, "").split(os.pathsep):
            return f"it was started with a {_PATH} of its own; {hand_over}"
        if RECEIPTS not in variables:
            return f"it was started without {RECEIPTS}; {hand_over}"
    return (
        "it is no Python of this environment, or was started with -I, -E or -S, which no start-up hook survives: "
        "leave those out and import megacpp_overlays in it, or do not demand a receipt of it; if it is only slow, "
        "raise the timeout"
    )


def _proc_words(pid: int, file: str) -> list[str] | None:
    """Return the NUL-separated words of a file of `/proc/<pid>`, or None when it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace")
    except OSError:
        return None
    return [word for word in text.split("\0") if word]
