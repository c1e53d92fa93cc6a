"""The part of an output layer that one rank holds, the gradients wanted of it, and the logits kept between its passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megacpp_overlays.kernels.linear_cross_entropy.path_buffer import narrow
from megacpp_overlays.kernels.linear_cross_entropy.two_paths import TwoPaths
from megacpp_overlays.kernels.masked_products.panels import Panels
from megacpp_overlays.kernels.masked_products.token_selection import Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part of an output layer: the parameters of its classes."""

    weight: torch.Tensor
    """(classes of this shard, hidden size), any strides."""
    bias: torch.Tensor | None = None
    """(classes of this shard,)."""
    class_weight: torch.Tensor | None = None
    """(classes of this shard,); None where label smoothing does not ask for it."""
    first_class: int = 0
    """The label of the shard's first class."""
    softcap: float | None = None
    logits_dtype: torch.dtype = torch.float32
    """Of a block of logits: float32, or that of the hidden states."""
    is_whole: bool = True
    """Whether no other rank holds classes: the gradient of the hidden states is no sum over ranks, in float32."""

    @property
    def classes(self) -> int:
        """How many there are."""
        return int(self.weight.shape[0])

    def bytes_of_a_class(self, hidden: torch.Tensor) -> int:
        """Return the bytes of one more class in a block: its logits, and its weight where the product wants a copy."""
        copy = hidden.shape[1] * hidden.element_size() if self.weight.dtype != hidden.dtype else 0
        return int(hidden.shape[0] * self.logits_dtype.itemsize + copy)

    def part(self, rows: slice) -> tuple[torch.Tensor, dict[str, torch.Tensor | float | None]]:
        """Return the weight of some classes, and the arguments that a pass over their logits takes."""
        of_classes = {"bias": self.bias, "class_weight": self.class_weight}
        parts = {name: None if each is None else each[rows] for name, each in of_classes.items()}
        return self.weight[rows], {**parts, "softcap": self.softcap}


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRequest:
    """Which gradients a backward pass computes, and where."""

    hidden: bool = True
    hidden_dtype: torch.dtype = torch.float32
    """Of the hidden states' gradient; float32 where it has to be added up still."""
    weight: bool = True
    bias: bool = True
    main_grad: torch.Tensor | None = None
    """(classes of this shard, hidden size), float32: the weight gradient is added to it instead of returned."""


class ShardGradients(NamedTuple):
    """Gradients of a backward pass; None where one is not wanted."""

    of_hidden: torch.Tensor | None
    """(tokens, hidden size), in the dtype asked for or, added up from several blocks, in the one of the sum; with a
    selection, of the selected tokens, one after the other, and anything after them."""
    of_weight: torch.Tensor | None
    """Shape and dtype of the weight."""
    of_bias: torch.Tensor | None
    """Shape and dtype of the bias."""


@dataclass(slots=True)
class KeptLogits:
    """Logits that wait for the first backward pass, without bias and softcap."""

    block: torch.Tensor | None
    """(tokens, classes from `first` to the last, and padding), or the buffer of `paths`; None once they were taken."""
    first: int
    """Row of the shard's weight that the first column belongs to."""
    selection: Selection | None = None
    """The tokens that its rows belong to; None where every token has its own."""
    panels: Panels | None = None
    """Where the block holds the first group of these, instead of the classes from `first` on."""
    paths: TwoPaths | None = None
    """The plan for the backward pass, if a forward pass on two paths filled the block; `block` is their buffer."""

    def bring_first(self, selection: Selection | None) -> None:
        """Move the rows of a backward pass's tokens to the front of the block; drop a block that lacks rows of them.

        Args:
            selection: a subset of the tokens that have rows; None for all tokens.
        """
        if self.block is None:
            return
        if selection is not None and self.paths is not None:
            self.paths = narrow(self.paths, selection, self.block)
        elif selection is not None:
            moved = selection if self.selection is None else selection.among(self.selection)
            moved.bring_first(self.block, self.panels)
        elif self.selection is not None:
            self.block = None  # it lacks rows, which happens where a result is not one that products can end in
        self.selection = selection

    def take(self) -> torch.Tensor | None:
        """Return the block and drop the reference to it: the caller overwrites it, and its memory must be freed in time."""
        block, self.block = self.block, None
        return block
