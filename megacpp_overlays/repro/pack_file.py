"""`pack.toml`: the facts of a pack that are neither in its notes nor in a declaration.

repository = "linkedin/Liger-Kernel"    # where it would be filed
upstream = "fixed"                      # new, overlap, fixed or declined
priority = "crash"                      # crash, piggyback, refactor, report or none: the order of filing
files = ["src/liger_kernel/ops/x.py"]   # the files of that repository that it is about
searched = 2026-11-20                   # optional: the day when upstream was last searched for threads and repairs

[[targets]]                             # only where no overlay declares them
distribution = "tilelang"
module = "tilelang.layout"
symbol = "Fragment"

[[threads]]                             # only those that no overlay declares
repository = "tile-ai/tilelang"
number = 2394
state = "closed, reported 2026-06-14"
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp_overlays.model import Target, Thread
from megacpp_overlays.repro.case import PackError

NAME = "pack.toml"

UPSTREAM = ("new", "overlap", "fixed", "declined")
"""Results of the search of upstream's threads and history: nothing, a thread on it, a repair, or a refusal to repair it."""
SETTLED = ("fixed", "declined")
"""Results that leave nothing to file."""
PRIORITIES = ("crash", "piggyback", "refactor", "report", "none")
"""Order of filing: a defect that stops a training run, one that joins an open thread, one that needs time of maintainers,
one without a repair to offer; `none` is never filed."""

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackFile:
    """The content of a `pack.toml`."""

    repository: str
    upstream: str
    priority: str
    files: tuple[str, ...]
    searched: datetime.date | None = None
    """Day when `upstream` was last searched; None where the file does not say it."""
    targets: tuple[Target, ...] = ()
    threads: tuple[Thread, ...] = ()


def read(folder: Path) -> PackFile:
    """Read the `pack.toml` of a pack's folder.

    Raises:
        PackError: there is none, it is no TOML, or a field is missing, unknown or not valid.
    """
    path = folder / NAME
    where = f"{folder.name}/{NAME}"
    try:
        data = _parse(path.read_text(), where)
    except FileNotFoundError as error:
        raise PackError(
            f"{where}: there is no such file; it names the repository, the priority and the files"
        ) from error
    fields = _Fields(data, where)
    found = PackFile(
        repository=fields.text("repository", _REPOSITORY),
        upstream=fields.choice("upstream", UPSTREAM),
        priority=fields.choice("priority", PRIORITIES),
        files=fields.texts("files"),
        searched=fields.day("searched"),
        targets=tuple(
            Target(each.text("distribution"), each.text("module"), each.text("symbol"))
            for each in fields.tables("targets")
        ),
        threads=tuple(
            Thread(each.text("repository", _REPOSITORY), each.number("number"), each.text("state"))
            for each in fields.tables("threads")
        ),
    )
    fields.nothing_else()
    return found


def _parse(text: str, where: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415 - not there before 3.11
    else:
        try:
            import tomli as tomllib  # noqa: PLC0415
        except ImportError as error:
            raise PackError(f"{where}: reading TOML on Python 3.10 needs tomli: pip install tomli") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PackError(f"{where} is no TOML: {error}") from error


class _Fields:
    """Checked reader of a table of the file. It takes field by field, and unknown names are an error."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self._left = dict(data)
        self._where = where
        self._inner: list[_Fields] = []

    def _take(self, name: str) -> Any:
        if name not in self._left:
            raise PackError(f"{self._where}: {name} is missing")
        return self._left.pop(name)

    def text(self, name: str, pattern: re.Pattern[str] | None = None) -> str:
        value = self._take(name)
        if not isinstance(value, str) or not value or (pattern and not pattern.fullmatch(value)):
            raise PackError(f"{self._where}: {name} = {value!r} is not valid")
        return value

    def number(self, name: str) -> int:
        value = self._take(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PackError(f"{self._where}: {name} = {value!r} is no number of a thread")
        return value

    def choice(self, name: str, words: tuple[str, ...]) -> str:
        value = self._take(name)
        if value not in words:
            raise PackError(f"{self._where}: {name} = {value!r} is none of {', '.join(words)}")
        return str(value)

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._take(name)
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            raise PackError(f"{self._where}: {name} is no list of texts")
        return tuple(value)

    def day(self, name: str) -> datetime.date | None:
        value = self._left.pop(name, None)
        if value is not None and type(value) is not datetime.date:
            raise PackError(f"{self._where}: {name} = {value!r} is no day such as 2026-11-20, without quotes")
        return value

    def tables(self, name: str) -> tuple[_Fields, ...]:
        value = self._left.pop(name, [])
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise PackError(f"{self._where}: {name} is no list of tables")
        found = tuple(_Fields(each, f"{self._where}: {name}[{index}]") for index, each in enumerate(value))
        self._inner += found
        return found

    def nothing_else(self) -> None:
        for table in self._inner:
            table.nothing_else()
        if self._left:
            raise PackError(f"{self._where}: {', '.join(sorted(self._left))} is not known")
