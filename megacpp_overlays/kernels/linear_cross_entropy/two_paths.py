"""Two ways through one pass where tokens may be skipped, of which the device makes one empty.

To skip tokens, hidden states of the others are copied, and the copy takes memory that a block of logits would have. So
where no token is masked blocks are narrow for nothing: sums in float32 are read and written more often, and products are
small. Whether a token is masked only the device knows, so launches are made for both ways:

- `whole`, where all tokens are selected: products read the hidden states themselves, in blocks as wide as without a copy;
- `some`, where at least one is not: products read a copy, in panels (see `masked_products.panels`).

Everything on the other way gets `row_counts.NOTHING` as its number of rows, and neither reads nor writes. So both have one
memory: the block of `whole` lies over the block and the copy of `some`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megacpp_overlays.kernels.linear_cross_entropy.memory import padded
from megacpp_overlays.kernels.linear_cross_entropy.panel_path import PanelPath
from megacpp_overlays.kernels.masked_products.panels import Panels
from megacpp_overlays.kernels.masked_products.row_counts import NOTHING
from megacpp_overlays.kernels.masked_products.token_selection import Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPaths:
    """Both ways. It holds no memory of logits, which has to go in time."""

    selection: Selection
    """The tokens that count, on whichever way."""
    whole: Panels
    """One in a group. They are laid for all tokens, or for `NOTHING`."""
    some: Panels
    """Laid for as many rows as the block has; in a backward pass more may have counted when it was filled."""
    whole_rows: torch.Tensor
    """(1,), int32: how many count on that way."""
    some_rows: torch.Tensor
    """(1,), int32."""
    first_rows: tuple[torch.Tensor | None, torch.Tensor | None]
    """See `PanelPath`, for each way."""
    dtype: torch.dtype
    """Of the logits."""

    @classmethod
    def cut(
        cls, selection: Selection, classes: int, whole: int, some: int, dtype: torch.dtype, most: int = 0
    ) -> TwoPaths | None:
        """Return both ways through a layer; None where blocks of some tokens cannot share their memory.

        Args:
            selection: the tokens that count.
            classes: how many there are.
            whole: classes of a block of all tokens, a multiple of `panels.CLASS_ALIGNMENT`.
            some: classes of a block beside a copy.
            dtype: of the logits.
            most: panels of a group; 0 means as many as have room.
        """
        tokens = selection.order.shape[0]
        every = selection.count == tokens
        whole_rows = torch.where(every, selection.count, NOTHING)
        some_rows = torch.where(every, NOTHING, selection.count)
        panels = Panels.cut(classes, some, tokens, some_rows, most)
        if panels is None:
            return None
        return cls(
            selection=selection,
            whole=Panels(classes, whole, tokens, whole_rows, 1),
            some=panels,
            whole_rows=whole_rows,
            some_rows=some_rows,
            first_rows=(whole_rows, some_rows),
            dtype=dtype,
        )

    def room(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return memory for either way.

        Args:
            hidden: (tokens, hidden size), of which `some` has a copy.
        """
        size = max(self._bytes_of(self.whole), self._bytes_of(self.some) + hidden.nbytes)
        room: torch.Tensor = torch.empty(size, dtype=torch.uint8, device=hidden.device)
        return room

    def through(self, hidden: torch.Tensor, room: torch.Tensor) -> tuple[PanelPath, PanelPath]:
        """Return both ways, `whole` first; hidden states are copied for the other one.

        Args:
            hidden: (tokens, hidden size), contiguous.
            room: see the method.
        """
        some, start = self.selection._replace(count=self.some_rows), self._bytes_of(self.some)
        copy = room[start : start + hidden.nbytes].view(hidden.dtype).view(hidden.shape)
        return (
            PanelPath(
                hidden=hidden,
                order=None,
                selection=self.selection._replace(count=self.whole_rows),
                panels=self.whole,
                block=self._block(self.whole, room),
                first_rows=self.first_rows[0],
            ),
            PanelPath(
                hidden=some.first(hidden, out=copy),
                order=None,
                selection=some,
                panels=self.some,
                block=self._block(self.some, room),
                first_rows=self.first_rows[1],
            ),
        )

    def once_filled(self) -> TwoPaths:
        """Return the same for a memory that has the first logits of the way that was gone."""
        return replace(self, first_rows=(None, None))

    def of_fewer(self, selection: Selection, room: torch.Tensor) -> TwoPaths:
        """Return both ways for some of the tokens, and bring what the memory has of them first.

        If all tokens counted and not all do now, it has nothing of `some`, whose first group has to be computed.

        Args:
            selection: of these tokens.
            room: filled by the way that was gone.
        """
        now = TwoPaths.cut(
            selection, self.some.classes, self.whole.width, self.some.width, self.dtype, self.some.group_limit
        )
        assert now is not None  # noqa: S101 - it was cut in the same way before
        all_did = self.whole_rows >= 0
        some = self.some._replace(planned_rows=torch.where(all_did, now.some_rows, self.some.planned_rows))
        moved = selection.among(self.selection)._replace(count=torch.where(all_did, NOTHING, now.some_rows))
        moved.bring_first(self._block(self.some, room), some)
        return replace(now, some=some, first_rows=(None, torch.where(all_did, now.some_rows, NOTHING)))

    def _bytes_of(self, panels: Panels) -> int:
        return int(panels.rows * padded(panels.width) * self.dtype.itemsize)

    def _block(self, panels: Panels, room: torch.Tensor) -> torch.Tensor:
        return room[: self._bytes_of(panels)].view(self.dtype).view(panels.rows, -1)
