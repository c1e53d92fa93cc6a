"""What a pickle of somebody else says, without making or calling anything that it names.

A pickle may name any function and have it called. Here a name becomes a class of its own that does nothing: it keeps what it
is called with and what state it is given. So nothing is imported, and what comes out is lists, dictionaries, tuples, numbers,
texts, and such objects.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import IO, Any

from megacpp_overlays.errors import CheckpointError


class Inert:
    """Stands for an object of a class that is not made, or for what a function that is not called would return."""

    kind = ""
    """The qualified name of the class or function."""
    given: tuple[Any, ...]
    """What it was made with."""
    state: Any = None
    """What it was filled with, such as a dictionary of attributes."""

    def __new__(cls, *given: Any, **_: Any) -> Inert:
        """Keep what it is made with."""
        made = object.__new__(cls)
        made.given = given
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def attribute(self, name: str) -> Any:
        """Return an attribute of the object that it stands for; None where it has none."""
        return self.state.get(name) if isinstance(self.state, dict) else None

    def __setitem__(self, key: Any, value: Any) -> None:
        """Take an entry, as a dictionary of its own class would."""

    def append(self, value: Any) -> None:
        """Take an entry, as a list of its own class would."""


def load(file: IO[bytes], what: str, persistent: Callable[[Any], Any] | None = None) -> Any:
    """Return what a pickle says.

    Args:
        file: where it begins.
        what: what it is, for the error.
        persistent: makes what an id that the pickle leaves to its reader stands for; without it there must be none.

    Raises:
        CheckpointError: it is none, or a damaged one.
    """
    try:
        return _InertReader(file, persistent).load()
    except Exception as error:  # the file may be anything, and so may what its reader stumbles over
        raise CheckpointError(f"{what} cannot be read: {type(error).__name__}: {error}") from error


# The one in C makes room for as many objects as a file says that it has; this one for what is there.
class _InertReader(pickle._Unpickler):  # noqa: SLF001
    def __init__(self, file: IO[bytes], persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(file)
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> type[Inert]:
        return type("Inert", (Inert,), {"kind": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it leaves something to its reader")
        return self._persistent(pid)
