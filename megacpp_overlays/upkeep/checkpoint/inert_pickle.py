"""A reader for pickles from untrusted sources that neither instantiates nor calls anything that the pickle names.

A pickle may name any function and have it called. Here each name becomes an inert class of its own, which only keeps its call
arguments and its state. So nothing is imported, and the result consists of lists, dictionaries, tuples, numbers, texts, and inert
objects.

A pickle of a few bytes may also ask for gigabytes: for a buffer of a length that it names, or for many objects of one byte
each. The memory of its objects is estimated while they are made, and a pickle that asks for much more than its length explains is
refused.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from typing import IO, Any, ClassVar

from megacpp_overlays.errors import CheckpointError


class Inert:
    """Placeholder for an instance of a class that is not instantiated, or for the result of a function that is not called."""

    kind = ""
    """The qualified name of the class or function."""
    given: tuple[Any, ...]
    """The positional arguments of its construction."""
    state: Any = None
    """The state from the pickle, such as a dictionary of attributes."""

    def __new__(cls, *given: Any, **_: Any) -> Inert:
        """Create the placeholder and keep its positional arguments."""
        made = object.__new__(cls)
        made.given = given
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def attribute(self, name: str) -> Any:
        """Return an attribute of the represented object; None where it has no such attribute."""
        return self.state.get(name) if isinstance(self.state, dict) else None

    def __setitem__(self, key: Any, value: Any) -> None:
        """Accept an entry and drop it, because the represented class may be a dictionary."""

    def append(self, value: Any) -> None:
        """Accept an entry and drop it, because the represented class may be a list."""


def load(file: IO[bytes], name: str, persistent: Callable[[Any], Any] | None = None) -> Any:
    """Return the object that a pickle describes.

    Args:
        file: the file, positioned at the start of the pickle.
        name: the name of the pickle in error messages.
        persistent: resolves the pickle's persistent ids; without it the pickle must have none.

    Raises:
        CheckpointError: the file is no pickle, a damaged one, or one that asks for too much memory.
    """
    try:
        return _InertReader(file, persistent).load()
    except _TooManyBytesError as error:
        raise CheckpointError(f"{name} is not read: {error}") from error
    except Exception as error:  # the file may hold anything, so its reader may raise anything
        raise CheckpointError(f"{name} cannot be read: {type(error).__name__}: {error}") from error


_ROOM = 64 << 20
"""Bytes that any pickle may ask for."""
_ROOM_FOR_A_BYTE = 64
"""Additional bytes for each byte of a pickle. Metadata of torch.distributed.checkpoint ask for 33 by this estimate, and take 20."""
_MOST_ROOM = 8 << 30
_MOST_KINDS = 1000
"""Maximum number of named classes and functions. Metadata name some dozen."""
_OTHER = 64
"""Bytes of a small object, and of its slot on the stack and in a list or dictionary."""
_SIZES = {
    **dict.fromkeys((pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.REDUCE, pickle.OBJ, pickle.INST), 250),
    **dict.fromkeys((pickle.EMPTY_SET, pickle.FROZENSET, pickle.ADDITEMS), 250),
    **dict.fromkeys((pickle.MEMOIZE, pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT), 100),
    **dict.fromkeys((pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE), 8),
    **dict.fromkeys((pickle.GET, pickle.BINGET, pickle.LONG_BINGET, pickle.DUP), 8),
    **dict.fromkeys((pickle.BUILD, pickle.SETITEM, pickle.SETITEMS, pickle.APPEND, pickle.APPENDS, pickle.POP), 0),
}
"""Bytes that an operation's result takes, where they differ from `_OTHER`. The content of texts and numbers is in the pickle itself."""


class _TooManyBytesError(Exception):
    """Raised for a pickle that asks for too much memory."""


# The unpickler in C allocates for as many objects as a file claims to have; this one only for the objects that are in it.
class _InertReader(pickle._Unpickler):  # noqa: SLF001
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)  # noqa: SLF001

    def __init__(self, file: IO[bytes], persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(file)
        self._persistent = persistent
        self._kinds: dict[tuple[str, str], type[Inert]] = {}
        start = file.tell()
        self._length = file.seek(0, os.SEEK_END) - start
        file.seek(start)
        self._room = min(_ROOM + _ROOM_FOR_A_BYTE * self._length, _MOST_ROOM)

    def take(self, size: int) -> None:
        """Subtract the bytes of an operation's result from the memory budget.

        Raises:
            _TooManyBytesError: the budget is used up.
        """
        self._room -= size
        if self._room < 0:
            raise _TooManyBytesError(
                f"its {self._length} bytes ask for far more memory than metadata of that length take"
            )

    def find_class(self, module: str, name: str) -> type[Inert]:
        if (module, name) not in self._kinds:
            if len(self._kinds) == _MOST_KINDS:
                raise _TooManyBytesError(f"it names more than {_MOST_KINDS} classes and functions")
            self._kinds[module, name] = type("Inert", (Inert,), {"kind": f"{module}.{name}"})
        return self._kinds[module, name]

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it leaves something to its reader")
        return self._persistent(pid)


def _buffer(reader: Any) -> None:
    """Read the bytes of a bytearray that are in the file. The standard library first allocates the claimed length."""
    (length,) = struct.unpack("<Q", reader.read(8))
    reader.take(length)
    reader.append(bytearray(reader.read(length)))


def _counted(operation: Callable[[Any], None], size: int) -> Callable[[Any], None]:
    def run(reader: Any) -> None:
        reader.take(size)
        operation(reader)

    return run


_InertReader.dispatch[pickle.BYTEARRAY8[0]] = _buffer
for _code, _operation in [*_InertReader.dispatch.items()]:
    _InertReader.dispatch[_code] = _counted(_operation, _SIZES.get(bytes([_code]), _OTHER))
