"""Trees that no probe needs at run time: a release as it was published, and a folder; `git_commit` has one more.

All of them read files by their path in the tree, so what a probe says of a place is the same on every machine. The
packages may lie at the top or below `src`.
"""

from __future__ import annotations

import importlib.util
import tarfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath

from megacpp_overlays.errors import SourceError, UpkeepError
from megacpp_overlays.source.trees import ModuleSource, ShippedFile

_TOPS = ("", "src/")


class FileTree(ABC):
    """Files by path; a context manager, since some of them hold something open."""

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """Return a file, or None when there is no such file."""

    @abstractmethod
    def has_folder(self, path: str) -> bool:
        """Return whether there is such a folder."""

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Let go of what is open."""

    def __enter__(self) -> FileTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has_package(self, name: str) -> bool:
        """Return whether there is a folder for a top-level package."""
        return any(self.has_folder(f"{top}{name}") for top in _TOPS)

    def module(self, name: str) -> ModuleSource | None:
        """Return the source of a module, with its path in the tree.

        Raises:
            SourceError: its text cannot be decoded.
        """
        stem = name.replace(".", "/")
        for path in (f"{top}{stem}{end}" for top in _TOPS for end in ("/__init__.py", ".py")):
            if (raw := self.read(path)) is not None:
                try:
                    return ModuleSource(name, path, importlib.util.decode_source(raw))
                except (SyntaxError, UnicodeDecodeError) as error:
                    raise SourceError(f"{path}: cannot be decoded: {error}") from error
        return None

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        """Return a file in the folder of a package, with its path in the tree."""
        for place in (f"{top}{package.replace('.', '/')}/{path}" for top in _TOPS):
            if (raw := self.read(place)) is not None:
                return ShippedFile(place, raw.decode(errors="replace"))
        return None


class ReadFiles(FileTree):
    """Files that were all read: a source distribution, whose members cannot be had one by one without unpacking."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def read(self, path: str) -> bytes | None:
        """Return a file, or None when there is no such file."""
        return self._files.get(path)

    def has_folder(self, path: str) -> bool:
        """Return whether there is a Python file below it."""
        return any(name.startswith(f"{path}/") for name in self._files)


class ZipFiles(FileTree):
    """A wheel, read in place."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._names = frozenset(archive.namelist())

    def read(self, path: str) -> bytes | None:
        """Return a member, or None when there is no such member."""
        return self._archive.read(path) if path in self._names else None

    def has_folder(self, path: str) -> bool:
        """Return whether there is a Python file below it."""
        return any(name.startswith(f"{path}/") and name.endswith(".py") for name in self._names)

    def close(self) -> None:
        """Close the archive."""
        self._archive.close()


class Folder(FileTree):
    """A folder with package folders: a checkout, an unpacked archive, site-packages."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, path: str) -> bytes | None:
        """Return a file, or None when there is no such file."""
        try:
            return (self.root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            raise SourceError(f"{path}: cannot read it: {error.strerror}") from error

    def has_folder(self, path: str) -> bool:
        """Return whether there is such a folder."""
        return (self.root / path).is_dir()


def open_archive(path: Path) -> FileTree:
    """Open a wheel or a source distribution.

    Raises:
        UpkeepError: it is neither, or it is damaged.
    """
    try:
        if path.suffix == ".whl":
            return ZipFiles(zipfile.ZipFile(path))
        with tarfile.open(path) as archive:
            return ReadFiles(dict(_members(archive)))
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise UpkeepError(f"{path.name}: cannot open this archive: {type(error).__name__}: {error}") from error


def newest_member(path: Path) -> float | None:
    """Return when the newest file of an archive was written, in seconds since 1970 UTC; None where it does not say."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            times = [_written(item) for item in archive.infolist()]
        return max((each for each in times if each is not None), default=None)
    with tarfile.open(path) as archive:
        return max((float(item.mtime) for item in archive if item.mtime > 0), default=None)


def _written(item: zipfile.ZipInfo) -> float | None:
    try:
        written = datetime(*item.date_time, tzinfo=timezone.utc)
    except ValueError:  # a month 0
        return None
    # A reproducible build writes the first day that an archive can name.
    return written.timestamp() if written.year > 1980 else None


def _members(archive: tarfile.TarFile) -> list[tuple[str, bytes]]:
    """Return the Python files of a source distribution, without the folder that all of them are in."""
    found = []
    for item in archive:
        parts = PurePosixPath(item.name).parts
        if item.isfile() and item.name.endswith(".py") and len(parts) > 1 and (file := archive.extractfile(item)):
            found.append(("/".join(parts[1:]), file.read()))
    return found
