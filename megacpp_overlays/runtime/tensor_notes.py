"""Notes about tensors, by identity.

An attribute would go on with `copy.deepcopy`, `pickle` and `torch.save` of the tensor. A note belongs to one tensor object and ends with it.

No note may stand for the content of a tensor: PyTorch counts writes to it (`_version`), but not those of a collective that receives into
it, of `.data`, of its storage, or of a NumPy or DLPack alias. A reader that relies on content compares it, on the device if need be.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Generic, TypeVar

Note = TypeVar("Note")


class TensorNotes(Generic[Note]):
    """Weak mapping from tensors to notes. Importing torch is left to the first note."""

    def __init__(self) -> None:
        self._by_tensor: MutableMapping[Any, Note] | None = None

    def get(self, tensor: Any) -> Note | None:
        """Return the note about this very tensor object, or None."""
        return None if self._by_tensor is None else self._by_tensor.get(tensor)

    def set(self, tensor: Any, note: Note) -> None:
        """Keep a note for as long as the tensor lives, in place of an earlier one."""
        if self._by_tensor is None:
            from torch.utils.weak import WeakIdKeyDictionary

            self._by_tensor = WeakIdKeyDictionary()
        self._by_tensor[tensor] = note
