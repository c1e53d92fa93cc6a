"""A block-wise reader of the tensors in a folder that torch.distributed.checkpoint wrote, without torch's own reader.

`.metadata` is a pickle, and so is the header of each tensor; `inert_pickle` reads both. The numbers of a tensor are in a zip
archive, uncompressed, at some position in a file of many archives. All offsets and sizes are checked against the file before
the numbers are read.

Format: https://docs.pytorch.org/docs/2.11/distributed.checkpoint.html (FileSystemReader), as of torch 2.0 to 2.11.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megacpp_overlays import files
from megacpp_overlays.errors import CheckpointError
from megacpp_overlays.upkeep.checkpoint import inert_pickle
from megacpp_overlays.upkeep.checkpoint.inert_pickle import Inert

METADATA = ".metadata"
_LARGEST_METADATA = 1 << 30
"""Maximum size of `.metadata` in bytes. It has some hundreds of bytes for each shard, and the largest models have some hundred
thousand shards."""
_LARGEST_HEADER = 1 << 20
_LATEST = "latest_checkpointed_iteration.txt"
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_STORAGES = {
    "torch.FloatStorage": "float32",
    "torch.BFloat16Storage": "bfloat16",
    "torch.HalfStorage": "float16",
}
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


class StoredShard(NamedTuple):
    """One rectangular part of a tensor, with its position in a file."""

    offsets: tuple[int, ...]
    """The offsets of its first element in the whole tensor."""
    file: str
    start: int
    """Offset in the file in bytes."""
    length: int
    """Length in bytes."""


def read(folder: Path) -> Mapping[str, tuple[StoredShard, ...]]:
    """Return the shards of every tensor of a checkpoint by its name.

    Raises:
        CheckpointError: there is no checkpoint in the folder, or it cannot be read.
    """
    path = folder / METADATA
    try:
        content = files.read(path, _LARGEST_METADATA)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} has no {METADATA}, so it is no checkpoint of this kind{_hint(folder)}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    said = inert_pickle.load(io.BytesIO(content), str(path))
    stored = said.attribute("storage_data") if isinstance(said, Inert) else None
    tensors = said.attribute("state_dict_metadata") if isinstance(said, Inert) else None
    if not isinstance(stored, dict) or not isinstance(tensors, dict):
        raise CheckpointError(f"{path} is no metadata of torch.distributed.checkpoint")
    found: dict[str, list[StoredShard]] = {}
    for index, place in stored.items():
        name, shard = _shard(index, place, path)
        if _is_tensor(tensors.get(name)):
            found.setdefault(name, []).append(shard)
    return {name: tuple(shards) for name, shards in found.items()}


def _hint(folder: Path) -> str:
    if not (folder / _LATEST).is_file():
        return ""
    within = sorted(each.parent.name for each in folder.glob(f"*/{METADATA}"))[-3:]
    return f"; name one of its iterations, such as {', '.join(within)}" if within else ""


def _is_tensor(about: object) -> bool:
    return isinstance(about, Inert) and about.kind.endswith(".TensorStorageMetadata")


def _shard(index: object, place: object, path: Path) -> tuple[str, StoredShard]:
    if isinstance(index, Inert) and isinstance(place, Inert):
        name, offsets = index.attribute("fqn"), _numbers(index.attribute("offset"))
        file, start, length = (place.attribute(each) for each in ("relative_path", "offset", "length"))
        if isinstance(name, str) and isinstance(file, str) and _are_sizes(start, length) and offsets is not None:
            if place.attribute("transform_descriptors"):
                raise CheckpointError(f"{path}: {name} is stored compressed or encrypted, which is not read here")
            return name, StoredShard(offsets, file, start, length)
    raise CheckpointError(f"{path} has an entry without a valid name, offset, file, start or length")


def _numbers(size: object) -> tuple[int, ...] | None:
    """Return the numbers of a torch.Size; an empty tuple for None, and None where it is malformed."""
    if size is None:
        return ()
    given = size.given[0] if isinstance(size, Inert) and size.given else size
    return tuple(given) if isinstance(given, list | tuple) and _are_sizes(*given) else None


def _are_sizes(*values: object) -> bool:
    return all(type(each) is int and 0 <= each < 1 << 62 for each in values)


class StoredValues:
    """The numbers of one shard, flattened; `read` returns a part of them. Use it as a context manager, which closes the file."""

    def __init__(self, folder: Path, shard: StoredShard, name: str) -> None:
        self._name = name
        with ExitStack() as stack:
            self._file = stack.enter_context(_open(folder, shard, name))
            try:
                self.dtype, self.shape, self._start = self._header(_Window(self._file, shard))
            except (OSError, ValueError, zipfile.BadZipFile, struct.error, NotImplementedError) as error:
                raise CheckpointError(f"{name} in {shard.file} cannot be read: {error}") from error
            self._closing = stack.pop_all()
        self.numel = math.prod(self.shape)

    def __enter__(self) -> StoredValues:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def read(self, start: int, stop: int) -> Any:
        """Return the numbers from `start` to `stop` as a tensor [stop - start]."""
        import torch

        size = _SIZES[self.dtype]
        self._file.seek(self._start + start * size)
        content = bytearray(self._file.read((stop - start) * size))
        if len(content) != (stop - start) * size:
            raise CheckpointError(f"{self._name} ends before its numbers do: the file was cut")
        return torch.frombuffer(content, dtype=getattr(torch, self.dtype)) if content else torch.empty(0)

    def _header(self, window: _Window) -> tuple[str, tuple[int, ...], int]:
        """Return dtype, shape, and the offset of the numbers in the file."""
        with zipfile.ZipFile(window) as archive:
            entries = {each.filename.partition("/")[2]: each for each in archive.infolist()}
        if "data.pkl" not in entries:
            raise ValueError("it is no tensor that torch.save wrote")
        if "byteorder" in entries and window.content(entries["byteorder"]) != b"little":
            raise ValueError("its numbers are in another order of bytes")
        said = inert_pickle.load(
            io.BytesIO(window.content(entries["data.pkl"])), f"the header of {self._name}", lambda pid: pid
        )
        if not isinstance(said, Inert) or said.kind != "torch._utils._rebuild_tensor_v2" or len(said.given) < 4:
            raise ValueError("it is no plain tensor")
        storage, offset, size, stride = said.given[:4]
        if not (isinstance(storage, tuple) and len(storage) == 5 and isinstance(storage[2], str)):
            raise ValueError("it does not say where its numbers are")
        dtype = _STORAGES.get(getattr(storage[1], "kind", ""))
        if dtype is None:
            raise ValueError(f"its numbers are {getattr(storage[1], 'kind', 'of a kind that is not known')}")
        shape, steps = _numbers(size), _numbers(stride)
        if shape is None or steps is None or not _are_sizes(offset) or not _is_contiguous(shape, steps):
            raise ValueError("its numbers do not lie one behind the other")
        entry = entries.get(f"data/{storage[2]}")
        if entry is None or entry.file_size < (offset + math.prod(shape)) * _SIZES[dtype]:
            raise ValueError("it has fewer numbers than it says")
        return dtype, shape, window.start + window.place(entry) + offset * _SIZES[dtype]


def _open(folder: Path, shard: StoredShard, name: str) -> BinaryIO:
    path = folder / shard.file
    if os.sep in shard.file or shard.file in {"", ".", ".."} or not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{name} is said to be in {shard.file}, which is not a file of this checkpoint")
    try:
        return files.open_regular(path)
    except OSError as error:
        raise CheckpointError(f"{name} is in {shard.file}, which cannot be read: {error.strerror or error}") from error


def _is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    step, expected = 1, []
    for size in reversed(shape):
        expected.append(step)
        step *= size
    pairs = zip(shape, stride, reversed(expected), strict=False)
    return len(shape) == len(stride) and all(size < 2 or own == right for size, own, right in pairs)


class _Window(io.RawIOBase):
    """A file object over a part of a file."""

    def __init__(self, file: BinaryIO, shard: StoredShard) -> None:
        self.start, self._length, self._at, self._file = shard.start, shard.length, 0, file
        if shard.start + shard.length > os.fstat(file.fileno()).st_size:
            raise ValueError("the file ends before it does")

    def content(self, entry: zipfile.ZipInfo) -> bytes:
        """Return a small uncompressed entry."""
        if entry.file_size > _LARGEST_HEADER:
            raise ValueError(f"its {entry.filename} is larger than {_LARGEST_HEADER} bytes")
        self.seek(self.place(entry))
        return self.read(entry.file_size)

    def place(self, entry: zipfile.ZipInfo) -> int:
        """Return the offset of the content of an uncompressed entry in the window."""
        self.seek(entry.header_offset)
        mark, _, flags, method, *_, name, extra = _LOCAL_HEADER.unpack(self.read(_LOCAL_HEADER.size))
        place = int(entry.header_offset + _LOCAL_HEADER.size + name + extra)
        if mark != b"PK\3\4" or method or entry.compress_type or flags & 1 or place + entry.file_size > self._length:
            raise ValueError(f"its {entry.filename} is compressed, or does not lie where it is said to")
        return place

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max({os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence] + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._at, 0)
        wanted = left if size < 0 else min(size, left)
        self._file.seek(self.start + self._at)
        content = self._file.read(wanted)
        self._at += len(content)
        return content
