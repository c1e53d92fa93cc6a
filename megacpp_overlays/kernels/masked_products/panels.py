"""Panels: chunks of the vocabulary that share one block of logits, stacked along its rows.

A block of logits has one row per token, but masked products use only the first of them, those of the selected tokens. If
few tokens are selected, most of the block is unused, and a product over one chunk of classes is too small to fill a GPU.
So the block holds several chunks, each in its own range of rows:

    rows of the block        contents
    0 to pitch               panel 0: logits of the selected tokens for classes 0 to width
    pitch to 2 * pitch       panel 1: logits of the selected tokens for classes width to 2 * width

The panels that are in the block at one time are a group. A pass over the vocabulary computes one group after another.

The number of panels in a group follows from the number of selected tokens, which only the device knows. The host
launches kernels for as many groups as there are panels, the largest number possible. Kernels of a group past the last
one return at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from megacpp_overlays.kernels.masked_products.row_counts import ROW_ALIGNMENT, aligned_rows

CLASS_ALIGNMENT = 256
"""Panel widths are multiples of this, the columns of the largest tile, so that no tile of a product covers two panels."""


class PanelGroup(NamedTuple):
    """Panels that are in the block at one time."""

    first: int
    """Index of the first panel."""
    size: int
    """Number of panels; 0 in groups past the last one."""
    pitch: int
    """Rows of the block from the start of a panel to the start of the next one."""


class Panels(NamedTuple):
    """Layout of a layer's classes in panels."""

    classes: int
    """Classes of all panels."""
    width: int
    """Classes of a panel; the last panel may have fewer."""
    rows: int
    """Rows of the block."""
    planned_rows: torch.Tensor
    """(1,), int32, on the device: tokens that each panel has room for. A backward pass may select fewer."""
    group_limit: int
    """Maximum number of panels in a group."""

    @classmethod
    def cut(
        cls, classes: int, width: int, rows: int, planned_rows: torch.Tensor, group_limit: int = 0
    ) -> Panels | None:
        """Cut the classes of a layer into panels; return None if no two panels can share a block.

        Args:
            classes: of the layer.
            width: of a panel, in classes. A width that is no multiple of `CLASS_ALIGNMENT` gives None.
            rows: of the block.
            planned_rows: (1,), int32, on the device: number of selected tokens.
            group_limit: maximum number of panels in a group; 0 sets none.
        """
        if group_limit == 1 or width % CLASS_ALIGNMENT or width >= classes or rows < 2 * ROW_ALIGNMENT:
            return None
        number = -(-classes // width)
        return cls(classes, width, rows, planned_rows, min(group_limit, number) if group_limit else number)

    @property
    def number(self) -> int:
        """Number of panels, and maximum number of groups."""
        return -(-self.classes // self.width)

    @property
    def arguments(self) -> dict[str, torch.Tensor | int]:
        """The parameters by which a Triton kernel finds its group, by name; see `panels_triton.panel_group`."""
        return {
            "planned_rows": self.planned_rows, "width": self.width, "panels": self.number, "group_limit": self.group_limit
        }  # fmt: skip

    def group(self, index: int) -> PanelGroup:
        """Return a group. This synchronises with the device.

        Groups have the same size, except that the last one may be smaller.
        """
        pitch = aligned_rows(int(self.planned_rows))
        groups = -(-self.number // min(max(1, self.rows // pitch), self.group_limit))
        size = -(-self.number // groups)
        first = index * size
        return PanelGroup(first, max(0, min(self.number - first, size)), pitch)

    def slices(self, index: int) -> Iterator[tuple[slice, slice]]:
        """Yield the rows in the block and the classes of each panel in a group. This synchronises with the device."""
        first, size, pitch = self.group(index)
        for place in range(size):
            start = (first + place) * self.width
            rows = slice(place * pitch, min((place + 1) * pitch, self.rows))
            yield rows, slice(start, min(start + self.width, self.classes))

    def is_last_group(self, index: int) -> bool:
        """Return whether a group contains the last panel. This synchronises with the device.

        A forward pass starts with it and ends with the first group, whose logits stay in the block.
        """
        first, size, _ = self.group(index)
        return size > 0 and first + size == self.number
