"""Source trees that are read file by file: a folder, a wheel, a source distribution. No training process needs them.

The packages may lie at the top or below `src`. A file is named by its path on this machine, or by its path in the tree
where a `prefix` is set: then the findings of a probe do not depend on the place of the tree.
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
    """Source tree with files by their path in the tree; a context manager, since some trees hold a file open."""

    prefix: str | Path = ""
    """Prefix of a path in the tree in the name of a file."""

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """Return a file, or None when there is no such file."""

    @abstractmethod
    def has_folder(self, path: str) -> bool:
        """Return whether there is such a folder."""

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Close the open file, if any."""

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
    """Source tree of a folder with top-level packages: a checkout, or an unpacked archive.

    It may be third-party data, so links are followed inside of it and not out of it, as in a commit of it.
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
    """Union of two trees, like the packages of two distributions that are installed in one environment."""

    def __init__(self, first: FileTree, second: FileTree) -> None:
        """Combine two trees. The first one takes precedence for a file of both. Neither is closed with the union."""
        self._trees = (first, second)

    def read(self, path: str) -> bytes | None:
        """Return a file of one of them, or None when neither has it."""
        return next((raw for tree in self._trees if (raw := tree.read(path)) is not None), None)

    def has_folder(self, path: str) -> bool:
        """Return whether one of them has such a folder."""
        return any(tree.has_folder(path) for tree in self._trees)


class ArchiveTree(FileTree):
    """Source tree of a wheel, read in place, or of a source distribution, whose members cannot be read one by one.

    The sizes that an archive claims are not trusted: unpacking stops at the limits for source files.
    """

    newest: float | None
    """Time of its newest file, in seconds since 1970 UTC; None where the archive does not say it."""
    damage: str | None = None
    """Description of the member that could not be read, once a read failed: probes then did not see all of the published files."""
    _content: Callable[[str], bytes]
    _links: Collection[str] = ()
    """Members of a source distribution that are links. A link in a wheel is installed as a file with its text."""

    def __init__(self, path: Path, *, prefix: str | None = None) -> None:
        """Open an archive.

        Raises:
            SourceError: the file is neither a wheel nor a source distribution, is damaged, or exceeds the limits for source.
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
            SourceError: the member is damaged, larger than the limit for a source file, or a link.
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
        """Return whether there is a Python file below a folder.

        Raises:
            SourceError: the folder is a link.
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
        """Raise where unpacking would create a link: it may lead anywhere, and its content is not in the archive under this name."""
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
"""Limit on the unpacked bytes of a source distribution, with files of all kinds."""
_MOST_MEMBERS = 200_000
_LATEST = 1 << 33
"""Seconds since 1970, in the year 2242. A later time of a file is ignored."""


class _TooLargeError(OSError):
    """Raised for an archive that exceeds the limits for source."""


_DAMAGE = (
    *(OSError, EOFError, ValueError, struct.error, zlib.error, zipfile.BadZipFile, tarfile.TarError),
    *(NotImplementedError, RuntimeError),  # an unknown compression, a password, deeply nested headers
)


class _LimitedStream(io.RawIOBase):
    """Stream with a limit on its length, far above that of a source distribution."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        """Return so many bytes.

        Raises:
            _TooLargeError: the size, which a header claims, is larger than any file, or the stream is too long.
        """
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
