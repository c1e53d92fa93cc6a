"""Trees that are read file by file: a folder, a wheel, a source distribution. No training process needs them.

The packages may lie at the top or below `src`. What is found is named by its path on this machine, or by its path in
the tree where a `prefix` says so: then a probe says the same of one tree wherever it lies.
"""

from __future__ import annotations

import tarfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import TypeVar

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
    """A folder that holds top-level packages: a checkout, an unpacked archive, site-packages."""

    def __init__(self, root: Path, *, prefix: str | None = None) -> None:
        self.root = root
        self.prefix = root if prefix is None else prefix

    def read(self, path: str) -> bytes | None:
        """Return a file, or None when there is no such file."""
        try:
            return (self.root / path).read_bytes()
        except IsADirectoryError:
            return None
        except (FileNotFoundError, NotADirectoryError):
            if leads_nowhere(self.root / path):
                raise SourceError(f"{self._shown(path)}: cannot read it: a link on its way leads nowhere") from None
            return None
        except OSError as error:
            raise SourceError(f"{self._shown(path)}: cannot read it: {error.strerror}") from error

    def has_folder(self, path: str) -> bool:
        """Return whether there is such a folder."""
        return (self.root / path).is_dir()


class ArchiveTree(FileTree):
    """A wheel, read in place, or a source distribution, whose members cannot be had one by one."""

    newest: float | None
    """When its newest file was written, in seconds since 1970 UTC; None where it does not say."""
    _content: Callable[[str], bytes]

    def __init__(self, path: Path, *, prefix: str | None = None) -> None:
        """Open an archive.

        Raises:
            SourceError: it is neither, or it is damaged.
        """
        self.prefix = path if prefix is None else prefix
        self._zip: zipfile.ZipFile | None = None
        try:
            self._open_wheel(path) if path.suffix == ".whl" else self._read_distribution(path)
        except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError) as error:
            raise SourceError(f"{path.name}: cannot open this archive: {type(error).__name__}: {error}") from error

    def read(self, path: str) -> bytes | None:
        """Return a member, or None when there is no such member."""
        return self._content(path) if path in self._names else None

    def has_folder(self, path: str) -> bool:
        """Return whether there is a Python file below it."""
        return any(name.startswith(f"{path}/") and name.endswith(".py") for name in self._names)

    def close(self) -> None:
        """Close the archive."""
        if self._zip is not None:
            self._zip.close()

    def _open_wheel(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self._content = self._zip.read
        self._names = frozenset(self._zip.namelist())
        self.newest = max(filter(None, map(_written, self._zip.infolist())), default=None)

    def _read_distribution(self, path: Path) -> None:
        """Read the Python files of a source distribution, without the folder that all of them are in."""
        files: dict[str, bytes] = {}
        times: list[float] = []
        with tarfile.open(path) as archive:
            for item in archive:
                times.append(item.mtime)
                parts = PurePosixPath(item.name).parts
                if item.isfile() and item.name.endswith(".py") and parts[1:] and (file := archive.extractfile(item)):
                    files["/".join(parts[1:])] = file.read()
        self._content = files.__getitem__
        self._names = frozenset(files)
        self.newest = max(filter(None, times), default=None)


def _written(item: zipfile.ZipInfo) -> float | None:
    try:
        written = datetime(*item.date_time, tzinfo=timezone.utc)
    except ValueError:  # a month 0
        return None
    # A reproducible build writes the first day that an archive can name.
    return written.timestamp() if written.year > 1980 else None
