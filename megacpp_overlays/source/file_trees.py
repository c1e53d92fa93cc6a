"""Trees that are read file by file: a folder, a wheel, a source distribution. No training process needs them.

The packages may lie at the top or below `src`. What is found is named by its path on this machine, or by its path in
the tree where a `prefix` says so: then a probe says the same of one tree wherever it lies.
"""

from __future__ import annotations

import gzip
import io
import os
import struct
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import IO, TypeVar, cast

from megacpp_overlays import files
from megacpp_overlays.errors import SourceError
from megacpp_overlays.source.trees import ModuleSource, ShippedFile, decoded, leads_nowhere

_TOPS = ("", "src/")
_Tree = TypeVar("_Tree", bound="FileTree")


class FileTree(ABC):
    """Files by their path in the tree; a context manager, since some trees hold something open."""

    prefix: str | Path = ""
    """What is put in front of a path in the tree to name a file."""

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """Return a file, or None when there is no such file."""

    @abstractmethod
    def has_folder(self, path: str) -> bool:
        """Return whether there is such a folder."""

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Let go of what is open."""

    def __enter__(self: _Tree) -> _Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has_package(self, name: str) -> bool:
        """Return whether there is a folder for a top-level package."""
        return any(self.has_folder(f"{top}{name}") for top in _TOPS)

    def module(self, name: str) -> ModuleSource | None:
        """Return the source of a module.

        Raises:
            SourceError: it cannot be read, or its text cannot be decoded.
        """
        stem = name.replace(".", "/")
        for path in (f"{top}{stem}{end}" for top in _TOPS for end in ("/__init__.py", ".py")):
            if (raw := self.read(path)) is not None:
                shown = self._shown(path)
                return ModuleSource(name, shown, decoded(shown, raw))
        return None

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        """Return a file in the folder of a package."""
        for place in (f"{top}{package.replace('.', '/')}/{path}" for top in _TOPS):
            if (raw := self.read(place)) is not None:
                return ShippedFile(self._shown(place), raw.decode(errors="replace"))
        return None

    def _shown(self, path: str) -> str:
        return str(Path(self.prefix, path))


class DirectoryTree(FileTree):
    """A folder that holds top-level packages: a checkout, or an unpacked archive.

    Somebody else may have made it, so links are followed inside of it and not out of it, as in a commit of it.
    """

    def __init__(self, root: Path, *, prefix: str | None = None) -> None:
        self.root = root
        self.prefix = root if prefix is None else prefix

    def read(self, path: str) -> bytes | None:
        """Return a file, or None when there is no such file.

        Raises:
            SourceError: it cannot be read, or a link leads out of the tree or nowhere.
        """
        self._demand_inside(path)
        try:
            return files.read(self.root / path)
        except IsADirectoryError:
            return None
        except (FileNotFoundError, NotADirectoryError):
            if leads_nowhere(self.root / path):
                raise SourceError(f"{self._shown(path)}: cannot read it: a link on its way leads nowhere") from None
            return None
        except OSError as error:
            raise SourceError(f"{self._shown(path)}: cannot read it: {error.strerror}") from error

    def has_folder(self, path: str) -> bool:
        """Return whether there is such a folder.

        Raises:
            SourceError: a link leads out of the tree.
        """
        self._demand_inside(path)
        return (self.root / path).is_dir()

    def _demand_inside(self, path: str) -> None:
        leads_to = Path(os.path.realpath(self.root / path))
        if not leads_to.is_relative_to(os.path.realpath(self.root)):
            raise SourceError(f"{self._shown(path)}: a link there leads out of the tree, to {leads_to}")


class BesideTree(FileTree):
    """Two trees as one, as packages of two distributions lie side by side where both are installed."""

    def __init__(self, first: FileTree, second: FileTree) -> None:
        """Lay one beside the other; what both have is the first one's. Neither is closed with it."""
        self._trees = (first, second)

    def read(self, path: str) -> bytes | None:
        """Return a file of one of them, or None when neither has it."""
        return next((raw for tree in self._trees if (raw := tree.read(path)) is not None), None)

    def has_folder(self, path: str) -> bool:
        """Return whether one of them has such a folder."""
        return any(tree.has_folder(path) for tree in self._trees)


class ArchiveTree(FileTree):
    """A wheel, read in place, or a source distribution, whose members cannot be had one by one.

    What it claims is not believed: no more is inflated than files of source have, whatever is packed into it.
    """

    newest: float | None
    """When its newest file was written, in seconds since 1970 UTC; None where it does not say."""
    damage: str | None = None
    """What of it could not be read, once that was tried: then what probes saw is not what was published."""
    _content: Callable[[str], bytes]
    _links: Collection[str] = ()
    """Members of a source distribution that are links. What a wheel calls one is installed as a file with that text."""

    def __init__(self, path: Path, *, prefix: str | None = None) -> None:
        """Open an archive.

        Raises:
            SourceError: it is neither, it is damaged, or it holds more than an archive of source does.
        """
        self.prefix = path if prefix is None else prefix
        self._name = path.name
        self._zip: zipfile.ZipFile | None = None
        try:
            self._open_wheel(path) if path.suffix == ".whl" else self._read_distribution(path)
        except _DAMAGE as error:
            raise SourceError(f"{path.name}: cannot open this archive: {type(error).__name__}: {error}") from error

    def read(self, path: str) -> bytes | None:
        """Return a member, or None when there is no such member.

        Raises:
            SourceError: it is damaged, or larger than a file of source is, or a link.
        """
        if path not in self._names:
            self._demand_no_link(path)
            return None
        try:
            return self._content(path)
        except _DAMAGE as error:
            self.damage = f"{self._name}: cannot read {path}: {type(error).__name__}: {error}"
            raise SourceError(self.damage) from error

    def has_folder(self, path: str) -> bool:
        """Return whether there is a Python file below it.

        Raises:
            SourceError: it is a link.
        """
        self._demand_no_link(path)
        return any(name.startswith(f"{path}/") and name.endswith(".py") for name in self._names)

    def python_files(self, package: str) -> Iterator[tuple[str, bytes]]:
        """Yield the Python files of a package, each with its path below the folder of the package.

        Raises:
            SourceError: see `read`.
        """
        folder = package.replace(".", "/")
        for prefix in (f"{folder}/", f"src/{folder}/"):
            names = [name for name in self._names if name.startswith(prefix) and name.endswith(".py")]
            for name in names:
                yield name.removeprefix(prefix), self.read(name) or b""
            if names:
                return

    def _demand_no_link(self, path: str) -> None:
        """Raise where unpacking would put a link: it may lead anywhere, and what it leads to is not here under this name."""
        for place in (path, *map(str, PurePosixPath(path).parents)):
            if place in self._links:
                self.damage = f"{self._name}: {place} is a link, which is not followed in an archive"
                raise SourceError(self.damage)

    def close(self) -> None:
        """Close the archive."""
        if self._zip is not None:
            self._zip.close()

    def _open_wheel(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self._content = self._member
        self._names = frozenset(self._zip.namelist())
        self.newest = max(filter(None, map(_written, self._zip.infolist())), default=None)

    def _member(self, path: str) -> bytes:
        assert self._zip is not None  # noqa: S101 - it is a wheel
        is_large = self._zip.getinfo(path).file_size > files.LARGEST
        with self._zip.open(path) as file:
            content = b"" if is_large else file.read(files.LARGEST + 1)
        if is_large or len(content) > files.LARGEST:
            raise _TooLargeError(f"it is larger than {files.LARGEST} bytes")
        return content

    def _read_distribution(self, path: Path) -> None:
        """Read the Python files of a source distribution, without the folder that all of them are in."""
        found: dict[str, bytes] = {}
        links: set[str] = set()
        times: list[float] = []
        with (
            files.open_regular(path) as raw,
            _opened(raw) as stream,
            tarfile.open(fileobj=stream, mode="r:") as archive,
        ):
            for number, item in enumerate(archive):
                if number > _MOST_MEMBERS:
                    raise _TooLargeError(f"it has more than {_MOST_MEMBERS} members")
                times.append(item.mtime)
                _, *parts = PurePosixPath(item.name).parts or ("",)
                name = "/".join(parts)
                found.pop(name, None)  # of two members of one name the last one counts
                links.discard(name)
                if item.issym() or item.islnk():
                    links.add(name)
                if not item.isfile() or not item.name.endswith(".py") or not parts:
                    continue
                if item.size > files.LARGEST:
                    raise _TooLargeError(f"{item.name} is larger than {files.LARGEST} bytes")
                if (file := archive.extractfile(item)) is not None:
                    found[name] = file.read()
        self._content = found.__getitem__
        self._names, self._links = frozenset(found), frozenset(links)
        self.newest = max((time for time in times if 0 < time < _LATEST), default=None)


_MOST_INFLATED = 1 << 30
"""Bytes of a source distribution, files of all kinds together."""
_MOST_MEMBERS = 200_000
_LATEST = 1 << 33
"""In the year 2242. What says that it was written later says nothing."""


class _TooLargeError(OSError):
    """Raised for an archive that holds more than one of source does."""


_DAMAGE = (
    *(OSError, EOFError, ValueError, struct.error, zlib.error, zipfile.BadZipFile, tarfile.TarError),
    *(NotImplementedError, RuntimeError),  # a compression that nobody has, a password, headers in headers in headers
)


class _LimitedStream(io.RawIOBase):
    """A stream that ends in an error where a source distribution would have ended long ago."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        """Return so many bytes; a header that claims to be larger than any file is none."""
        if not 0 <= size <= files.LARGEST:
            raise _TooLargeError("a header in it is larger than any file")
        self._check(self._stream.tell() + size)
        return self._stream.read(size)

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        self._check(place)
        return self._stream.seek(place, whence)

    def tell(self) -> int:
        """Return the place."""
        return self._stream.tell()

    def _check(self, place: int) -> None:
        if place > _MOST_INFLATED:
            raise _TooLargeError(f"more than {_MOST_INFLATED} bytes are packed into it")


def _opened(raw: IO[bytes]) -> _LimitedStream:
    is_packed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    return _LimitedStream(cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if is_packed else raw)


def _written(item: zipfile.ZipInfo) -> float | None:
    try:
        written = datetime(*item.date_time, tzinfo=timezone.utc)
    except ValueError:  # a month 0
        return None
    # A reproducible build writes the first day that an archive can name.
    return written.timestamp() if written.year > 1980 else None
