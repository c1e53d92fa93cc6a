"""The one way to write a file, and the one way to read a file that others may have written.

What is written is whole: a reader sees the old file or the new one, never half of one, also after a crash, an interrupt or
on a full disk. What is read is a regular file of a size that was thought of: neither a FIFO nor a device can stop the
reader, and no file can exhaust its memory.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

LARGEST = 64 << 20
"""Bytes. No file of source, of metadata or of answers comes near it."""
_TO_DRAFT = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TO_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def write_text(path: Path, text: str) -> None:
    """Write a text in one step, as UTF-8; see `write`."""
    write({path: text.encode()})


def write(contents: Mapping[Path, bytes], *, private: bool = False) -> None:
    """Write files, each in one step, and none of them before all are on the disk.

    Args:
        contents: by path; what is there keeps its mode, and a link stays one, its target is written.
        private: a new file is for this user alone, and a link is replaced.

    Raises:
        OSError: one cannot be written; its attribute `filename` says which. That one and those after it are as they were.
    """
    with ExitStack() as stack:
        drafts = [
            _draft(path if private else path.resolve(), content, 0o600 if private else 0o666, stack)
            for path, content in contents.items()
        ]
        for draft, target in drafts:
            draft.replace(target)


def _draft(target: Path, content: bytes, mode: int, stack: ExitStack) -> tuple[Path, Path]:
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
    return draft, target


def read(path: Path, limit: int = LARGEST) -> bytes:
    """Return what a regular file holds; a link is followed.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than the limit.
    """
    return _read(os.open(path, _TO_READ), path, limit)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file of any size; a link is followed.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    return _regular(os.open(path, _TO_READ), path)


def read_text(path: Path, limit: int = LARGEST) -> str:
    """Return the text of a regular file in UTF-8; see `read`.

    Raises:
        OSError: as `read`.
        UnicodeDecodeError: it is no such text.
    """
    return read(path, limit).decode()


def read_own(path: Path, limit: int) -> bytes:
    """Return what a regular file of this user holds, found without following a link to it.

    Raises:
        OSError: it cannot be read, or is not what is said above.
    """
    descriptor = os.open(path, _TO_READ | os.O_NOFOLLOW)
    if (owner := os.fstat(descriptor).st_uid) != os.geteuid():
        os.close(descriptor)
        raise PermissionError(errno.EPERM, f"it belongs to user {owner}", os.fspath(path))
    return _read(descriptor, path, limit)


def _read(descriptor: int, path: Path, limit: int) -> bytes:
    with _regular(descriptor, path) as file:
        is_large = os.fstat(descriptor).st_size > limit
        content = b"" if is_large else file.read(limit + 1)
        if is_large or len(content) > limit:
            raise OSError(errno.EFBIG, f"it is larger than {limit} bytes", os.fspath(path))
        return content


def _regular(descriptor: int, path: Path) -> BinaryIO:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))


def make_private_folder(folder: Path) -> None:
    """Make a folder for this user alone, unless it is there.

    Raises:
        OSError: it cannot be made, or `demand_private_folder` refuses the one that is there.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    demand_private_folder(folder)


def demand_private_folder(folder: Path) -> None:
    """Raise where somebody else could put files into a folder, or take them out.

    Raises:
        OSError: it belongs to another user, or others may write into it.
    """
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {found.st_uid}", os.fspath(folder))
    if found.st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(errno.EPERM, "others may write into it (chmod go-w)", os.fspath(folder))
