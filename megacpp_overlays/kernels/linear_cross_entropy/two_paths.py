"""Two paths for a pass that skips masked tokens: the host launches both, and the device runs one.

A pass that skips tokens works on a compacted copy of the selected hidden states. The copy takes memory from the block of
logits. Blocks get narrower, products smaller, and float32 sums are read and written more often, which costs time for
nothing if no token is masked. Only the device knows which case applies, so the host launches the kernels of two paths:

- The dense path is for passes in which all tokens are selected. Products read the hidden states in place, and blocks are
  as wide as without a copy.
- The compact path is for all other passes. Products read the copy, and the logits are in panels, see
  `masked_products.panels`.

Kernels of the path that the device does not run get the row count `row_counts.NOTHING`, and return without reading or
writing tensors of tokens. So the paths share one buffer:

    dense      | block of logits, (tokens, wide)                               |
    compact    | block of logits, (tokens, narrow) | copy of the hidden states |

This file has the plan of both paths. `path_buffer` allocates that buffer and writes into it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megacpp_overlays.kernels.linear_cross_entropy.memory import padded
from megacpp_overlays.kernels.masked_products.panels import Panels
from megacpp_overlays.kernels.masked_products.row_counts import NOTHING
from megacpp_overlays.kernels.masked_products.token_selection import Selection


class PathPlan(NamedTuple):
    """Layout and row counts of one path."""

    panels: Panels
    """Layout of the logits. Each group of the dense path has one panel."""
    rows: torch.Tensor
    """(1,), int32: number of selected tokens, or `NOTHING` if the device runs the other path."""
    recomputed_rows: torch.Tensor | None
    """(1,), int32: rows of the first group that a backward pass computes again; None if the buffer still has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPaths:
    """Plan of both paths. It holds no logits, so that their memory can be released while the plan is kept."""

    selection: Selection
    """The selected tokens, whichever path runs."""
    dense: PathPlan
    compact: PathPlan
    """Its panels have room for the tokens of the forward pass that filled the buffer, which may be more than selected."""
    dtype: torch.dtype
    """Of the logits."""

    @classmethod
    def cut(
        cls,
        selection: Selection,
        classes: int,
        dense_width: int,
        compact_width: int,
        dtype: torch.dtype,
        group_limit: int = 0,
    ) -> TwoPaths | None:
        """Plan both paths through a layer; return None if the compact path cannot have panels.

        Args:
            selection: the selected tokens.
            classes: of the layer.
            dense_width: classes of a block of the dense path, a multiple of `panels.CLASS_ALIGNMENT`.
            compact_width: classes of a panel of the compact path.
            dtype: of the logits.
            group_limit: maximum number of panels in a group of the compact path; 0 sets none.
        """
        tokens = selection.order.shape[0]
        dense_rows, compact_rows = row_counts_of_paths(selection)
        panels = Panels.cut(classes, compact_width, tokens, compact_rows, group_limit)
        if panels is None:
            return None
        return cls(
            selection=selection,
            dense=PathPlan(Panels(classes, dense_width, tokens, dense_rows, 1), dense_rows, dense_rows),
            compact=PathPlan(panels, compact_rows, compact_rows),
            dtype=dtype,
        )

    def block_bytes(self, plan: PathPlan) -> int:
        """Return the bytes of a path's block of logits."""
        return int(plan.panels.rows * padded(plan.panels.width) * self.dtype.itemsize)


def row_counts_of_paths(selection: Selection) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row counts of the dense and the compact path, each (1,), int32. One of them is `NOTHING`."""
    all_selected = selection.count == selection.order.shape[0]
    return torch.where(all_selected, selection.count, NOTHING), torch.where(all_selected, NOTHING, selection.count)
