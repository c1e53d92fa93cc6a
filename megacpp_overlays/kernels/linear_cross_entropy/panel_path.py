"""A way through the panels of a pass over a vocabulary: what its products read, and where its logits are."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megacpp_overlays.kernels.masked_products.panels import Panels
from megacpp_overlays.kernels.masked_products.token_selection import Selection


class PanelPath(NamedTuple):
    """One way."""

    hidden: torch.Tensor
    """(tokens, hidden size): the rows that products read."""
    order: torch.Tensor | None
    """(tokens,), int64: in which they take them; None if the selected ones come first."""
    selection: Selection
    """The tokens that count. With `row_counts.NOTHING` as their number the whole way does nothing."""
    panels: Panels
    """The classes."""
    block: torch.Tensor
    """(tokens, classes of a panel or more), for logits."""
    first_rows: torch.Tensor | None
    """(1,), int32: of how many rows a backward pass computes the logits of the first group; None if the block has them."""
