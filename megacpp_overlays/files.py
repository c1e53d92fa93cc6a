"""Atomic writes, and bounded reads of files that other users may have written.

Writes are atomic: a reader sees the old file or the new one, never a part of one, also after a crash, an interrupt or on a
full disk. Only a regular file is replaced; a device or a FIFO is written in place. Reads accept only a regular file below a
size limit: neither a FIFO nor a device can block the reader, and no file can exhaust its memory.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

LARGEST = 64 << 20
"""Bytes. No file of source, of metadata or of answers comes near it."""
_PIECE = 1 << 20
_TO_DRAFT = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TO_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_IN_PLACE = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40
"""Links on the way to a file; the kernel follows no more either."""
_ROOT = 0


def cache_folder() -> Path:
    """Return the folder of this package in the user's cache, by the XDG Base Directory Specification.

    It is below XDG_CACHE_HOME, or below ~/.cache if that variable is not set, is empty, or is a relative path, which the
    specification ignores. The function does not create the folder.
    """
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (chosen if chosen.is_absolute() else Path.home() / ".cache") / "megacpp-overlays"


def write_text(path: Path, text: str) -> None:
    """Write a text atomically, as UTF-8; see `write`."""
    write({path: text.encode()})


def write(contents: Mapping[Path, bytes], *, private: bool = False) -> None:
    """Write files, each atomically. No file is replaced before the drafts of all are on the disk.

    A regular file keeps its mode. A character device, a FIFO and an open descriptor, such as `/dev/stdout`, are written
    in place: the content is appended to their stream. A link stays a link, and its target is written.

    Args:
        contents: by path.
        private: a new file is for this user alone, and a link is replaced.

    Raises:
        OSError: a file cannot be written, is a folder, a socket or a block device, or is reached through a link that
            `demand_trusted_links` refuses. The attribute `filename` names the file. That file and those after it are unchanged.
    """
    with ExitStack() as stack:
        prepared = [_prepare(path, content, stack, private=private) for path, content in contents.items()]
        for each in prepared:
            each.finish()


class _PendingWrite(Protocol):
    """A prepared write that lacks only its last step."""

    def finish(self) -> None:
        """Complete the write."""


class _Draft:
    """Content of a regular file, in a draft file next to it."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path, self.target = path, target

    def finish(self) -> None:
        self.path.replace(self.target)


class _Stream:
    """Content for an open descriptor that cannot be replaced."""

    def __init__(self, descriptor: int, path: Path, content: bytes) -> None:
        self.descriptor, self.path, self.content = descriptor, path, content

    def finish(self) -> None:
        try:
            with open(self.descriptor, "wb", closefd=False) as file:
                file.write(self.content)
        except OSError as error:
            error.filename = os.fspath(self.path)
            raise


def _prepare(path: Path, content: bytes, stack: ExitStack, *, private: bool) -> _PendingWrite:
    if private:
        _demand_replaceable(path)
        return _draft(path, content, 0o600, stack)
    place = _resolved(path)
    if isinstance(place, Path) and not _is_written_in_place(place):
        _demand_replaceable(place)
        return _draft(place, content, 0o666, stack)
    descriptor = _opened_in_place(place) if isinstance(place, Path) else os.dup(place)
    stack.callback(os.close, descriptor)
    return _Stream(descriptor, path, content)


def _mode_of(path: Path) -> int:
    """Return the type and mode of a path, without following a link; 0 if it does not exist."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return 0


def _is_written_in_place(path: Path) -> bool:
    mode = _mode_of(path)
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def _opened_in_place(path: Path) -> int:
    """Open a character device or a FIFO for writing, without waiting for a reader of the FIFO."""
    try:
        descriptor = os.open(path, _IN_PLACE)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "no process reads from it", os.fspath(path)) from error
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def _demand_replaceable(path: Path) -> None:
    """Raise if a path is neither a regular file nor a link: a regular file must not replace it."""
    mode = _mode_of(path)
    if mode and not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise _not_regular(mode, path)


def demand_trusted_links(path: Path) -> None:
    """Raise if a path leads through a link that another user may have planted.

    A link in a folder that every user may write to, such as `/tmp`, is followed only if this user or root owns it.

    Raises:
        OSError: the path has such a link, or too many links.
    """
    _resolved(path)


def _resolved(path: Path) -> Path | int:
    """Return a path without links, or the number of the open descriptor of this process that it names."""
    left = list(reversed(path.absolute().parts[1:]))
    found = Path("/")
    links = 0
    while left:
        name = left.pop()
        if name == "..":
            found = found.parent
            continue
        place = found / name
        if not stat.S_ISLNK(_mode_of(place)):
            found = place
            continue
        if str(found) == f"/proc/{os.getpid()}/fd":
            if left:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(path))
            return int(name)
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
        _demand_trusted_link(place)
        led_to = place.readlink()
        left += reversed(led_to.parts[led_to.is_absolute() :])
        found = Path("/") if led_to.is_absolute() else found
    return found


def _demand_trusted_link(link: Path) -> None:
    owner = link.lstat().st_uid
    if owner not in {os.geteuid(), _ROOT} and link.parent.stat().st_mode & stat.S_IWOTH:
        reason = f"it is a link of user {owner} in a folder that everybody may write into; name its target instead"
        raise PermissionError(errno.EPERM, reason, os.fspath(link))


def _draft(target: Path, content: bytes, mode: int, stack: ExitStack) -> _Draft:
    draft = target.with_name(f".{target.name[:200]}.{os.urandom(8).hex()}")
    stack.callback(draft.unlink, missing_ok=True)
    try:
        descriptor = os.open(draft, _TO_DRAFT, mode)
        with open(descriptor, "wb") as file:
            if mode & 0o077 and target.exists():
                os.fchmod(descriptor, stat.S_IMODE(target.stat().st_mode))
            file.write(content)
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        error.filename = os.fspath(target)
        raise
    return _Draft(draft, target)


def read(path: Path, limit: int = LARGEST) -> bytes:
    """Return the content of a regular file; a link is followed.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is larger than the limit.
    """
    return _read(os.open(path, _TO_READ), path, limit)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file of any size; a link is followed.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    return _regular(os.open(path, _TO_READ), path)


def read_text(path: Path, limit: int = LARGEST) -> str:
    """Return the text of a regular file in UTF-8; see `read`.

    Raises:
        OSError: as `read`.
        UnicodeDecodeError: the content is not valid UTF-8.
    """
    return read(path, limit).decode()


def read_own(path: Path, limit: int, *, or_of_root: bool = False) -> bytes:
    """Return the content of a regular file that this user owns; a link to it is not followed.

    Args:
        path: of the file.
        limit: bytes.
        or_of_root: whether root may own the file as well.

    Raises:
        OSError: the file cannot be read, is a link, is not a regular file, has another owner, or is larger than the limit.
    """
    descriptor = os.open(path, _TO_READ | os.O_NOFOLLOW)
    if (owner := os.fstat(descriptor).st_uid) not in _owners(or_of_root):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, f"it belongs to user {owner}", os.fspath(path))
    return _read(descriptor, path, limit)


def _read(descriptor: int, path: Path, limit: int) -> bytes:
    with _regular(descriptor, path) as file:
        pieces, left = [], limit - os.fstat(descriptor).st_size
        if left >= 0:
            left = limit
            # In pieces: one read allocates memory for all the bytes that it asks for, even if the file has few.
            while left >= 0 and (piece := file.read(min(_PIECE, left + 1))):
                pieces.append(piece)
                left -= len(piece)
        if left < 0:
            raise OSError(errno.EFBIG, f"it is larger than {limit} bytes", os.fspath(path))
        return b"".join(pieces)


def _regular(descriptor: int, path: Path) -> BinaryIO:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise _not_regular(mode, path)


def _not_regular(mode: int, path: Path) -> OSError:
    if stat.S_ISDIR(mode):
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    return OSError(errno.EINVAL, "it is no regular file", os.fspath(path))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder during the block, so that one process at a time runs it. The folder is created if needed."""
    import fcntl  # noqa: PLC0415 - a launch locks nothing

    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems lock no folder
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_private_folder(folder: Path) -> None:
    """Create a folder that only this user can read and write, unless it exists.

    Raises:
        OSError: the folder cannot be created, or `demand_private_folder` refuses an existing one.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    demand_private_folder(folder)


def is_of_root_alone(folder: Path) -> bool:
    """Return whether a folder exists, belongs to root and is writable by root alone, and this process is not root."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == _ROOT != os.geteuid() and not found.st_mode & _WRITABLE_BY_OTHERS


def _owners(or_of_root: bool) -> set[int]:
    return {os.geteuid(), *([_ROOT] if or_of_root else [])}


def demand_private_folder(folder: Path, *, or_of_root: bool = False) -> None:
    """Raise if another user could put files into a folder, or remove them.

    Args:
        folder: the folder.
        or_of_root: whether root may own it, too; root can write into every folder anyway.

    Raises:
        OSError: the folder belongs to another user, or others may write into it.
    """
    found = folder.stat()
    if found.st_uid not in _owners(or_of_root):
        raise PermissionError(errno.EPERM, f"it belongs to user {found.st_uid}", os.fspath(folder))
    if found.st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(errno.EPERM, "others may write into it (chmod go-w)", os.fspath(folder))
