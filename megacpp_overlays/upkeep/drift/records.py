"""RECORD: the list of files that a wheel was published with and an installer keeps, with their hashes.

Format: https://packaging.python.org/specifications/recording-installed-packages/#the-record-file. It is parsed here and
not by `importlib_metadata`, whose `files` leaves out files that are no longer on disk.
"""

from __future__ import annotations

import base64
import csv
import enum
import hashlib
import io
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megacpp_overlays import files
from megacpp_overlays.errors import UpkeepError

ALGORITHMS = frozenset({"sha256", "sha384", "sha512", "sha3_256", "sha3_384", "sha3_512", "blake2b", "blake2s"})
"""Hash algorithms that the specification of wheels allows, sha256 or better, and that every Python has."""

_UNHASHED = ("RECORD", "RECORD.jws", "RECORD.p7s")
_CHUNK = 1 << 20
_SIZE = re.compile("[0-9]{1,18}")


class Kind(enum.Enum):
    """The kind of difference between a file and its published form."""

    CHANGED = "changed"
    MISSING = "missing"
    ADDED = "added"


class CannotCheckError(UpkeepError):
    """Raised for a file without a valid hash in RECORD, or one that cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordEntry:
    """One line of a RECORD."""

    file: str
    """Path as RECORD has it: with slashes, relative to the folder that holds the dist-info folder, or absolute."""
    algorithm: str
    """The hash algorithm; empty where the line has no hash."""
    digest: str
    """The digest in URL-safe base64 without padding."""
    size: int | None
    """Size in bytes."""

    @property
    def may_lack_hash(self) -> bool:
        """Whether the specification allows this line without a hash: RECORD, its signatures, and bytecode."""
        path = PurePosixPath(self.file)
        return (
            is_bytecode(path)
            or path.suffix == ".pyc"
            or (path.name in _UNHASHED and path.parent.suffix == ".dist-info")
        )


def parse(text: str) -> tuple[RecordEntry, ...]:
    """Read the text of a RECORD.

    Raises:
        UpkeepError: a line is malformed; the message has its number.
    """
    found = []
    try:
        rows = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise UpkeepError(f"RECORD cannot be read: {error}") from error
    for number, row in enumerate(rows, start=1):
        if not row:
            continue
        if len(row) != 3 or not row[0] or "\0" in row[0]:
            raise UpkeepError(f"RECORD, line {number}: a line is a path, a hash and a size, not {','.join(row)!r}")
        file, hashed, size = row
        algorithm, separator, digest = hashed.partition("=")
        if (hashed and not (algorithm and separator and digest)) or (size and not _SIZE.fullmatch(size)):
            raise UpkeepError(f"RECORD, line {number}: {hashed!r}, {size!r} is no hash and size")
        length = int(size) if size else None
        plain = digest.rstrip("=")  # some tools write padding
        found.append(RecordEntry(file=file.removeprefix("./"), algorithm=algorithm.lower(), digest=plain, size=length))
    return tuple(found)


def is_bytecode(path: PurePosixPath) -> bool:
    """Return whether a file is compiled from a source that Python compiles again when needed.

    A `.pyc` in the folder of the sources does not count: Python imports it where there is no source. It never reads a `.pyo`.
    """
    return path.suffix == ".pyo" or "__pycache__" in path.parts


def hides_source(path: Path) -> bool:
    """Return whether Python runs a file of `__pycache__` without checking its source: an unchecked hash-based `.pyc`.

    Source: https://peps.python.org/pep-0552/, the flags that follow the magic number.
    """
    if path.suffix != ".pyc":
        return False
    try:
        with files.open_regular(path) as file:
            header = file.read(16)
    except OSError:  # Python cannot read it either
        return False
    return len(header) == 16 and int.from_bytes(header[4:8], "little") == 0b01


def difference(entry: RecordEntry, path: Path, *, quick: bool = False) -> Kind | None:
    """Compare an installed file with its line of RECORD; None means that it is as published.

    Args:
        entry: a line with a hash.
        path: the path of the file.
        quick: whether to compare only the size where RECORD has it. A change that keeps the size is not detected.

    Raises:
        CannotCheckError: the line has no valid hash, or the file cannot be read.
    """
    if entry.algorithm not in ALGORITHMS:
        raise CannotCheckError(f"{entry.file} has {f'a hash of {entry.algorithm}' if entry.algorithm else 'no hash'}")
    try:
        if not path.is_file():
            return Kind.CHANGED if path.exists() and not path.is_dir() else Kind.MISSING
        if entry.size is not None and path.stat().st_size != entry.size:
            return Kind.CHANGED
        if quick and entry.size is not None:
            return None
        return None if _digest(path, entry.algorithm) == _decoded(entry) else Kind.CHANGED
    except OSError as error:
        raise CannotCheckError(f"{entry.file} cannot be read: {error.strerror}") from error


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex.

    Raises:
        OSError: the file cannot be read.
    """
    return _digest(path, "sha256").hex()


def _decoded(entry: RecordEntry) -> bytes:
    try:
        return base64.b64decode(f"{entry.digest}{'=' * (-len(entry.digest) % 4)}", altchars=b"-_", validate=True)
    except ValueError as error:
        raise CannotCheckError(f"{entry.file} has a hash that is no base64") from error


def _digest(path: Path, algorithm: str) -> bytes:
    found = hashlib.new(algorithm)
    with files.open_regular(path) as file:  # a compiled library may be larger than free memory
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.digest()
