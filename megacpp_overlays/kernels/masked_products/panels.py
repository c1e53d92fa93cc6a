"""Panels of classes that share the memory of one block of logits, one below the other, where few tokens count.

A block of logits has room for a row of every token, and where a tenth of them counts nine tenths of it lie idle, while
products over one block are too small to fill a device. So the memory of a block is cut into as many parts as have room for
the rows that count, and each holds other classes of the same tokens. How many those are only the device knows: a vocabulary
has as many groups of panels as it would have blocks if all tokens counted, launches are made for all of them, and those
after the last one find nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

WHOLE = 128
"""Rows after the selected ones are zero up to the next multiple of this, or to this where none is selected.

No tile of a product over the first rows reaches beyond, and such a product takes one step at least.
"""
NOTHING = -1
"""A count of rows with which products, passes and copies write nothing at all, not even zeros: what they would do is done
elsewhere. Panels laid for it are laid for no row.
"""
WIDTH = 256
"""A panel's classes are a multiple of this, so that no tile of a product reaches into two of them."""


class Panels(NamedTuple):
    """How the classes of a layer are cut into panels."""

    classes: int
    """Of all panels together; the last one may be narrower than the others."""
    width: int
    """Classes of a panel."""
    rows: int
    """Of the memory that the panels of a group share."""
    laid: torch.Tensor
    """(1,), int32: rows that a panel has room for, at least. What counts later may be fewer."""
    most: int
    """Panels of a group, at most."""

    @classmethod
    def cut(cls, classes: int, width: int, rows: int, laid: torch.Tensor, most: int = 0) -> Panels | None:
        """Return the panels of a layer; None where blocks of so many classes cannot share their memory.

        Args:
            classes: how many there are.
            width: classes of a block.
            rows: of a block.
            laid: (1,), int32: how many rows count.
            most: panels of a group; 0 means as many as have room.
        """
        if most == 1 or width % WIDTH or width >= classes or rows < 2 * WHOLE:
            return None
        panels = -(-classes // width)
        return cls(classes, width, rows, laid, min(most, panels) if most else panels)

    @property
    def number(self) -> int:
        """How many there are; and groups, if no two of them fit into the memory."""
        return -(-self.classes // self.width)

    def of_group(self, group: int) -> tuple[int, int, int]:
        """Return the first panel of a group, how many it has, and the rows from one to the next; waits for the device.

        Groups are as equal as can be. The first one is never smaller than another, and groups after the last are empty.
        """
        height = max(1, -(-int(self.laid) // WHOLE)) * WHOLE
        groups = -(-self.number // min(max(1, self.rows // height), self.most))
        together = -(-self.number // groups)
        first = group * together
        return first, max(0, min(self.number - first, together)), height

    def parts(self, group: int) -> Iterator[tuple[slice, slice]]:
        """Yield the rows of the memory that a panel of this group may take, and its classes; waits for the device."""
        first, here, height = self.of_group(group)
        for panel in range(here):
            start = (first + panel) * self.width
            rows = slice(panel * height, min((panel + 1) * height, self.rows))
            yield rows, slice(start, min(start + self.width, self.classes))

    def begins(self, group: int) -> bool:
        """Return whether this group has the last panel, where a pass from the last group to the first begins."""
        first, here, _ = self.of_group(group)
        return here > 0 and first + here == self.number
