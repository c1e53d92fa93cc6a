"""PanelPath: the inputs and the logits block of one pass over a vocabulary in panels (`masked_products.panels`)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megacpp_overlays.kernels.masked_products.panels import Panels
from megacpp_overlays.kernels.masked_products.token_selection import Selection


class PanelPath(NamedTuple):
    """Tensors of a forward or backward pass over the first classes of a shard."""

    hidden: torch.Tensor
    """(tokens, hidden size), the dtype of the weight: left factor of the logits' product."""
    order: torch.Tensor | None
    """(tokens,), int64: rows of `hidden` that products gather; None if `hidden` has the selected rows first."""
    selection: Selection
    """The tokens of this pass. If its count is `row_counts.NOTHING`, kernels of the path write nothing."""
    panels: Panels
    """Layout of the logits in `block`."""
    block: torch.Tensor
    """(tokens, panel width or more), the dtype of the logits: memory for one group of panels."""
    recomputed_rows: torch.Tensor | None
    """(1,), int32: rows of the first group that a backward pass computes again; None if the block still has them."""
