"""Receipts of child processes: a file with the statement of each, in a folder that its parent reads.

Only this user can write to the folder. A file in it counts only if it has the format of a receipt.
A receipt is written when the process is armed and again after each decision. Forked children write theirs when they are
forked, not when they end: `multiprocessing` ends them without running exit handlers.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from megacpp_overlays import files
from megacpp_overlays.errors import SettingsError
from megacpp_overlays.frozen import replace
from megacpp_overlays.loader import statement
from megacpp_overlays.loader.log import logger
from megacpp_overlays.loader.session import Session, current
from megacpp_overlays.loader.settings import RECEIPTS
from megacpp_overlays.loader.statement import Statement
from megacpp_overlays.model import Decision, Record
from megacpp_overlays.source.trees import InstalledTree

NOT_READ = "not read"
"""Placeholder for the source of a target that waits: the source is known only after the import."""


_MOST_BYTES = 1 << 20
"""Limit on the size of one receipt; receipts of today have about 20 kB."""


class Receipt(NamedTuple):
    """Statement of a process, with the identity of the process."""

    host: str
    pid: int
    ppid: int
    start: int
    """Start time of the process in clock ticks of its host: differs from that of another process with a recycled id."""
    image: int
    """Address where its stack begins: differs between programs that were executed in one process; 0 if unknown."""
    started: str
    """`fork`: it has the memory of its parent; `exec`: it armed on its own."""
    name: str | None
    """Its name in `multiprocessing`, once it has one."""
    program: str
    """`sys.argv[0]`."""
    given: float
    """Time of this receipt in seconds since 1970."""
    statement: Statement


class _ReceiptWriter:
    """Writer of the receipt of this process, into every folder that asks for it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._started = "exec"
        self._life = this_life()
        self.folders: list[Path] = []
        session.when_changed = self.write_everywhere
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def write_everywhere(self) -> None:
        """Write it into every folder, and never raise: the parent finds out when it demands a receipt."""
        for folder in self.folders:
            self._try(folder)

    def _try(self, folder: Path) -> None:
        try:
            self.write(folder)
        except OSError as error:
            if folder.is_dir():  # it is removed when the handle that asked for receipts is closed
                logger.warning("%s", _cannot_be_written(folder, error))
        except Exception:  # noqa: BLE001 - this runs inside hooks, while upstream is imported
            logger.exception("no receipt in %s", folder)

    def write(self, folder: Path) -> None:
        """Write it into one folder, whole or not at all."""
        files.demand_private_folder(folder)
        with self._lock:
            receipt = self._receipt()
            path = folder / f"{receipt.pid}-{receipt.start}-{receipt.image}.json"
            files.write({path: json.dumps(receipt._asdict()).encode()}, private=True)

    def _receipt(self) -> Receipt:
        start, image, _ = self._life
        program = sys.argv[0] if getattr(sys, "argv", None) else ""
        said = own_statement(self._session)
        return Receipt(
            this_host(), os.getpid(), os.getppid(), start, image, self._started, _name(), program, time.time(), said
        )

    def _forked(self) -> None:
        self._lock = threading.Lock()  # a thread that the child does not have may hold the old one
        self._started = "fork"
        self._life = this_life()
        self.write_everywhere()


_writer: _ReceiptWriter | None = None


def write_receipts_that_are_asked_for(session: Session) -> None:
    """Write receipts into the folder that the environment names, if it names one.

    Raises:
        SettingsError: see `write_receipts`; in a child it is printed and not raised.
    """
    settings = session.settings
    if not settings.receipts:
        return
    try:
        write_receipts(session, settings.receipts, make=not settings.parent_is_armed)
    except SettingsError as error:
        # A child did not ask for receipts and may run as another user: it goes on, and `demand` reports the missing receipt.
        if not settings.parent_is_armed:
            raise
        with contextlib.suppress(Exception):  # a stderr that is closed or broken
            sys.stderr.write(f"[megacpp_overlays] {error}\n")


def write_receipts(session: Session, folder: str | Path, *, make: bool = True) -> None:
    """Write a receipt of this process into a folder now and after each decision; forked children do the same.

    Args:
        session: of this process.
        folder: the folder of the receipts.
        make: whether to make the folder. Only the process that asks for receipts does: a child must not make a removed folder again.

    Raises:
        SettingsError: the folder cannot be written, or others can write to it.
    """
    global _writer
    _writer, folder = _writer or _ReceiptWriter(session), Path(folder)
    try:
        if make:
            files.make_private_folder(folder)
        _writer.write(folder)
    except OSError as error:
        raise SettingsError(_cannot_be_written(folder, error)) from error
    if folder not in _writer.folders:
        _writer.folders.append(folder)


def stop_writing_receipts(folder: Path) -> None:
    """Write no more receipts into a folder, unless the parent of this process asked for them there."""
    if _writer is not None and folder in _writer.folders and current().settings.receipts != str(folder):
        _writer.folders.remove(folder)


def _cannot_be_written(folder: Path, error: OSError) -> str:
    return f"{RECEIPTS}={folder} cannot be written: {error.strerror}; name a folder that this process may write, or unset it"


def own_statement(session: Session) -> Statement:
    """Return the statement of this process without the source of targets that wait, whose files may change until then."""
    audit = session.audit_so_far()
    records = tuple(replace(r, source_sha256=NOT_READ) if _is_unsettled(r) else r for r in audit.records)
    return statement.of(replace(audit, records=records), InstalledTree())


def _is_unsettled(record: Record) -> bool:
    return record.finding is None and record.decision in {Decision.ARMED, Decision.DISABLED}


def _name() -> str | None:
    # A child bears the name of its parent until `multiprocessing` has named it.
    name = multiprocessing.current_process().name
    return None if name == "MainProcess" else name


def this_host() -> str:
    """Return the name of this host."""
    return os.uname().nodename if hasattr(os, "uname") else ""


class Life(NamedTuple):
    """Identity of a process and of the program in it, as Linux keeps it."""

    start: int
    image: int
    state: str


def life_of(pid: int | str) -> Life | None:
    """Return the identity of a process; None when there is no such process, or no Linux."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return Life(start=int(fields[19]), image=int(fields[25]), state=fields[0])  # proc(5), fields 22, 28 and 3


def this_life() -> Life:
    """Return the identity of this process; without Linux, the time in nanoseconds, which is unique."""
    return life_of("self") or Life(time.time_ns(), 0, "R")


def is_history(receipt: Receipt) -> bool:
    """Return whether the process that wrote it has executed another program since."""
    life = life_of(receipt.pid) if receipt.host == this_host() else None
    return life is not None and life.start == receipt.start and not is_alike(receipt.image, life.image)


def is_alike(image: int, other: int) -> bool:
    """Return whether two stacks may belong to one program. A process that has ended has no stack any more."""
    return image == other or 0 in {image, other}


def read_receipts(paths: Iterable[Path]) -> list[Receipt]:
    """Return the receipts in these files. Files that hold no receipt, or were just replaced by a newer one, are skipped."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found.append(_receipt_of(json.loads(files.read_own(path, _MOST_BYTES))))
    return found


def _receipt_of(data: Any) -> Receipt:
    """Return a receipt that was read.

    Raises:
        ValueError: it is no receipt.
    """
    if not isinstance(data, dict) or data.keys() != set(Receipt._fields):
        raise ValueError("this is no receipt")
    numbers = [data[name] for name in ("pid", "ppid", "start", "image")]
    texts = [data[name] for name in ("host", "started", "program")]
    if (
        not all(type(number) is int for number in numbers)
        or not all(isinstance(text, str) for text in texts)
        or not isinstance(data["name"], str | None)
        or type(data["given"]) not in {int, float}
        or not math.isfinite(data["given"])
    ):
        raise ValueError("a field of this receipt is none")
    return Receipt(**{**data, "statement": statement.checked(data["statement"])})
