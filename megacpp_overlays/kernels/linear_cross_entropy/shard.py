"""Linear cross entropy over the part of a vocabulary that one rank holds, a block of classes at a time.

The blocks run along the vocabulary because then each block of the weight gradient is one product over all tokens,
summed in float32 and rounded once, and only the gradient of the hidden states is added up between blocks, in float32,
by the product itself. A block's gradient takes the place of its logits. Or the logits are kept from the forward
pass, all of them, and there is one block.

Where tokens are selected, a block has their rows alone, one after the other, and its products end after them. How many
they are only the device knows, so the memory of a block is that of all tokens.

cuBLAS through torch and the passes of `vocabulary_softmax`; no host synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory, padded
from megacpp_overlays.kernels.masked_products.products import Products, available
from megacpp_overlays.kernels.masked_products.token_selection import Selection
from megacpp_overlays.kernels.vocabulary_softmax.numbers import Coefficients, Statistics
from megacpp_overlays.kernels.vocabulary_softmax.passes import add_statistics, logits_gradient, room_for_statistics

_NUMBERS_OF_A_SELECTED_TOKEN = 64
"""Bytes beside its hidden states: its place, its label, and what turns its logits into their gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part of an output layer, and what belongs to its classes."""

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
        """Return what one more class in a block takes: its logits, and its weight where the product wants a copy."""
        copy = hidden.shape[1] * hidden.element_size() if self.weight.dtype != hidden.dtype else 0
        return int(hidden.shape[0] * self.logits_dtype.itemsize + copy)

    def part(self, rows: slice) -> tuple[torch.Tensor, dict[str, torch.Tensor | float | None]]:
        """Return the weight of some classes, and the arguments that a pass over their logits takes."""
        of_classes = {"bias": self.bias, "class_weight": self.class_weight}
        parts = {name: None if each is None else each[rows] for name, each in of_classes.items()}
        return self.weight[rows], {**parts, "softcap": self.softcap}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which gradients a backward pass computes, and where."""

    hidden: bool = True
    hidden_dtype: torch.dtype = torch.float32
    """Of the hidden states' gradient; float32 where it has to be added up still."""
    weight: bool = True
    bias: bool = True
    main_grad: torch.Tensor | None = None
    """(classes of this shard, hidden size), float32: the weight gradient is added to it instead of returned."""


class ShardGradients(NamedTuple):
    """What a backward pass gives; None where it is not wanted."""

    of_hidden: torch.Tensor | None
    """(tokens, hidden size), in the dtype asked for or, added up from several blocks, in the one of the sum; with a
    selection, of the selected tokens, one after the other, and anything after them."""
    of_weight: torch.Tensor | None
    """Shape and dtype of the weight."""
    of_bias: torch.Tensor | None
    """Shape and dtype of the bias."""


@dataclass(slots=True)
class Kept:
    """Logits that wait for the first backward pass, without bias and softcap."""

    block: torch.Tensor | None
    """(tokens, classes from `first` to the last, and padding); None once they were taken."""
    first: int
    """Row of the shard's weight that the first column belongs to."""
    selection: Selection | None = None
    """The tokens that its rows belong to; None where every token has its own."""

    def bring_first(self, selection: Selection | None) -> None:
        """Bring the rows of these tokens first, which have theirs here; or of all, for which the block may have to go."""
        if self.block is None:
            return
        if selection is not None:
            moved = selection if self.selection is None else selection.among(self.selection)
            moved.bring_first(self.block)
        elif self.selection is not None:
            self.block = None  # it lacks rows, which happens where a result is not one that products can end in
        self.selection = selection

    def take(self) -> torch.Tensor | None:
        """Return the block, which nothing else refers to from now on: it is overwritten, and has to go in time."""
        block, self.block = self.block, None
        return block


def shard_statistics(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    shard: Shard,
    memory: Memory,
    *,
    spread: bool = False,
    keep: torch.dtype | None = None,
    selection: Selection | None = None,
) -> tuple[Statistics, Kept]:
    """Return what the loss needs to know of this shard's logits, and the last block of them, which is in memory anyway.

    Args:
        hidden: (tokens, hidden size), contiguous.
        labels: (tokens,), integer, contiguous; over the whole vocabulary.
        shard: the output layer.
        memory: what a block may take.
        spread: whether label smoothing asks for the sum of all logits.
        keep: dtype in which all logits are one block. None cuts them as the backward pass does.
        selection: the tokens whose logits are computed; see `vocabulary_softmax.passes` for what the others get.
    """
    tokens = hidden.shape[0]
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    running = room_for_statistics(tokens, hidden.device, wide, spread=spread)
    dtype = keep or shard.logits_dtype
    step = shard.classes if keep else _step(hidden, shard, memory)
    products = Products(None if selection is None else selection.count)
    order = None
    if selection is not None:
        hidden, order = _chosen(hidden, selection, shard, memory)
    block = torch.empty((tokens, padded(step)), dtype=dtype, device=hidden.device)
    rows = slice(0)
    for rows in _blocks(shard.classes, step):
        weight, options = shard.part(rows)
        logits = block[:, : weight.shape[0]]
        products.of_rows(hidden, weight.to(hidden.dtype).t(), out=logits, order=order)
        first_class, first = shard.first_class + rows.start, rows.start == 0
        add_statistics(logits, labels, first_class, running, first=first, selection=selection, **options)
    return running, Kept(block, rows.start, selection)


def shard_gradients(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    shard: Shard,
    coefficients: Coefficients,
    memory: Memory,
    wanted: Wanted,
    *,
    kept: Kept | None = None,
    selection: Selection | None = None,
    when_hidden_is_done: Callable[[torch.Tensor], None] | None = None,
) -> ShardGradients:
    """Return this shard's share of the gradient for `hidden`, and the gradients for weight and bias.

    The gradient of the logits is formed in float32 and rounded once, to the dtype of `hidden`, for the products. In
    float16 small ones vanish there unless the loss is scaled, as they do in PyTorch's own.

    Args:
        hidden: (tokens, hidden size), contiguous.
        labels: (tokens,), integer, contiguous; over the whole vocabulary.
        shard: the output layer.
        coefficients: what the passes over all shards came to.
        memory: what the gradient of the hidden states and a block may take together.
        wanted: which gradients.
        kept: logits of the forward pass, which are overwritten; of the same selection. The others are computed again;
            without it, all are.
        selection: the tokens that have a gradient; None computes all.
        when_hidden_is_done: called with the gradient of the hidden states as soon as it is complete, before the
            last product, so that communication can run beside that.
    """
    step = _step(hidden, shard, memory)
    block = kept.take() if kept else None
    first_kept = kept.first if kept and block is not None else shard.classes
    if block is not None:
        step = max(1, min(step, shard.classes - first_kept))  # its memory is that of all blocks
    todo = [slice(first_kept, shard.classes)] * (first_kept < shard.classes) + _blocks(first_kept, step)
    products = Products(None if selection is None else selection.count)
    order = None
    copied = False
    if selection is not None:
        hidden, order = _chosen(hidden, selection, shard, memory)
        copied = order is None
    # In half precision a copy of the hidden states that nobody needs any more has room for their gradient.
    overwrite = copied and when_hidden_is_done is None and wanted.hidden_dtype == hidden.dtype
    sums = _Sums(hidden, shard, wanted, products, order=order, one_block=len(todo) == 1, overwrite=overwrite)
    for rows in todo:
        weight, options = shard.part(rows)
        weight = weight.to(hidden.dtype)
        if block is None:
            block = torch.empty((hidden.shape[0], padded(step)), dtype=shard.logits_dtype, device=hidden.device)
        if rows.start < first_kept:
            block = block.view(shard.logits_dtype)
            products.of_rows(hidden, weight.t(), out=block[:, : weight.shape[0]], order=order)
        logits, gradient = block[:, : weight.shape[0]], block.view(hidden.dtype)[:, : weight.shape[0]]
        first_class = shard.first_class + rows.start
        logits_gradient(logits, labels, first_class, coefficients, gradient, selection=selection, **options)
        sums.add_bias(rows, gradient)
        if when_hidden_is_done is None:
            sums.add_weight(rows, gradient)
            sums.add_hidden(gradient, weight)
        else:
            sums.add_hidden(gradient, weight)
            if rows is todo[-1] and sums.of_hidden is not None:
                when_hidden_is_done(sums.of_hidden)
            sums.add_weight(rows, gradient)
    return ShardGradients(sums.of_hidden, sums.of_weight, sums.of_bias)


class _Sums:
    """The gradients, as far as the blocks have come."""

    def __init__(
        self,
        hidden: torch.Tensor,
        shard: Shard,
        wanted: Wanted,
        products: Products,
        *,
        order: torch.Tensor | None,
        one_block: bool,
        overwrite: bool,
    ) -> None:
        self.of_hidden: torch.Tensor | None = None
        self.of_weight = torch.empty_like(shard.weight) if wanted.weight and wanted.main_grad is None else None
        self.of_bias = torch.empty_like(shard.bias) if wanted.bias and shard.bias is not None else None
        self._hidden, self._wanted, self._products, self._order = hidden, wanted, products, order
        self._dtype = wanted.hidden_dtype if one_block else _wider(hidden.dtype)
        self._overwrite = one_block and overwrite

    def add_bias(self, rows: slice, gradient: torch.Tensor) -> None:
        if self.of_bias is not None:
            self._products.sum_rows(gradient, out=self.of_bias[rows])

    def add_weight(self, rows: slice, gradient: torch.Tensor) -> None:
        if self._wanted.main_grad is not None:
            out = self._wanted.main_grad[rows]
            self._products.over_rows(gradient, self._hidden, out=out, add=True, order=self._order)
        elif self.of_weight is not None:
            self._products.over_rows(gradient, self._hidden, out=self.of_weight[rows], order=self._order)

    def add_hidden(self, gradient: torch.Tensor, weight: torch.Tensor) -> None:
        if not self._wanted.hidden:
            return
        add = self.of_hidden is not None
        if self.of_hidden is None:
            self.of_hidden = self._room()
        self._products.of_rows(gradient, weight, out=self.of_hidden, add=add)

    def _room(self) -> torch.Tensor:
        if self._overwrite:
            return self._hidden
        room: torch.Tensor = torch.empty(self._hidden.shape, dtype=self._dtype, device=self._hidden.device)
        return room


def is_one_block(hidden: torch.Tensor, shard: Shard, memory: Memory) -> bool:
    """Return whether all classes share one block of logits, which the forward pass leaves to the backward pass."""
    return memory.fits(shard.bytes_of_a_class(hidden), shard.classes, _beside_one_block(hidden, shard, memory))


def _step(hidden: torch.Tensor, shard: Shard, memory: Memory) -> int:
    """Return the classes of a block."""
    return memory.classes_with(
        shard.bytes_of_a_class(hidden),
        _beside(hidden, shard, memory),
        shard.classes,
        taken_by_one=_beside_one_block(hidden, shard, memory),
    )


def _beside(hidden: torch.Tensor, shard: Shard, memory: Memory) -> int:
    """Return the bytes of the gradient of the hidden states in float32 and of a copy of selected tokens.

    The finished gradient is only made after the last block is gone, and its memory counts as a result.
    """
    beside = _of_sums(hidden)
    if memory.may_skip and available(hidden.dtype, hidden, shard.weight):
        beside += _NUMBERS_OF_A_SELECTED_TOKEN * hidden.shape[0]
        beside += hidden.nbytes if _copies(hidden, shard, memory) else 0
    return int(beside)


def _of_sums(hidden: torch.Tensor) -> int:
    return int(hidden.numel() * max(4 - hidden.element_size(), 0))


def _copies(hidden: torch.Tensor, shard: Shard, memory: Memory) -> bool:
    """Return whether hidden states of selected tokens are copied, which makes their products simpler."""
    beside = _of_sums(hidden) + hidden.nbytes + _NUMBERS_OF_A_SELECTED_TOKEN * hidden.shape[0]
    taken_by_one = 0 if shard.is_whole else beside
    if memory.fits(shard.bytes_of_a_class(hidden), shard.classes, taken_by_one):
        return True
    return memory.leaves_room(beside)


def _chosen(
    hidden: torch.Tensor, selection: Selection, shard: Shard, memory: Memory
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return hidden states, and the order in which products take their rows; None if the selected ones come first."""
    if _copies(hidden, shard, memory):
        return selection.first(hidden), None
    return hidden, selection.order


def _beside_one_block(hidden: torch.Tensor, shard: Shard, memory: Memory) -> int:
    """Return the same where nothing is added up but between ranks: one rank writes its result at once."""
    return 0 if shard.is_whole else _beside(hidden, shard, memory)


def _blocks(classes: int, step: int) -> list[slice]:
    """Return the rows of each block. If one has to be narrower it is the first: the last one may be kept."""
    return [slice(max(0, stop - step), stop) for stop in range(classes, 0, -step)][::-1]


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
