"""Linear cross entropy over the part of a vocabulary that one rank holds, a block of classes at a time.

The blocks run along the vocabulary because then each block of the weight gradient is one product over all tokens,
summed in float32 and rounded once, and only the gradient of the hidden states is added up between blocks, in float32,
by the product itself. A block's gradient takes the place of its logits. Or the logits are kept from the forward
pass, all of them, and there is one block.

Where tokens are selected, a block has their rows alone, one after the other, and its products end after them. How many
they are only the device knows, so the memory of a block is that of all tokens; where few are selected it holds several
blocks at a time, as `masked_products.panels` says. Where they may be all, `two_paths` says how that costs little.

cuBLAS through torch and the passes of `vocabulary_softmax`; no host synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megacpp_overlays.kernels.linear_cross_entropy.memory import Masked, Memory, padded
from megacpp_overlays.kernels.linear_cross_entropy.panel_path import PanelPath
from megacpp_overlays.kernels.linear_cross_entropy.two_paths import TwoPaths
from megacpp_overlays.kernels.masked_products.panels import Panels
from megacpp_overlays.kernels.masked_products.products import PanelProducts, Products, available
from megacpp_overlays.kernels.masked_products.token_selection import Selection
from megacpp_overlays.kernels.vocabulary_softmax.numbers import Coefficients, Statistics
from megacpp_overlays.kernels.vocabulary_softmax.passes import (
    add_panel_statistics,
    add_statistics,
    logits_gradient,
    panel_gradients,
    room_for_statistics,
)

_TWO_PATHS_WERE_RUN_ON_A_GPU = False
"""Until they were, tokens of a GPU are skipped on one path; `tests/gpu/test_labelled_tokens.py` says otherwise for itself."""
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
    """(tokens, classes from `first` to the last, and padding), or the memory of `paths`; None once they were taken."""
    first: int
    """Row of the shard's weight that the first column belongs to."""
    selection: Selection | None = None
    """The tokens that its rows belong to; None where every token has its own."""
    panels: Panels | None = None
    """Where the block holds the first group of these, instead of the classes from `first` on."""
    paths: TwoPaths | None = None
    """Where it was filled by one of these."""

    def bring_first(self, selection: Selection | None) -> None:
        """Bring the rows of these tokens first, which have theirs here; or of all, for which the block may have to go."""
        if self.block is None:
            return
        if selection is not None and self.paths is not None:
            self.paths = self.paths.of_fewer(selection, self.block)
        elif selection is not None:
            moved = selection if self.selection is None else selection.among(self.selection)
            moved.bring_first(self.block, self.panels)
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
    if not keep and (both := _two_paths(hidden, shard, memory, selection)):
        room = both.room(hidden)
        for path in both.through(hidden, room):
            _panel_statistics(path, labels, shard, running)
        return running, Kept(room, 0, selection, paths=both.once_filled())
    products = Products(None if selection is None else selection.count)
    order = None
    if selection is not None:
        hidden, order = _chosen(hidden, selection, shard, memory)
    block = torch.empty((tokens, padded(step)), dtype=dtype, device=hidden.device)
    panels = None if keep else _panels(hidden, shard, memory, step, shard.classes, selection)
    if panels is not None and selection is not None:
        _panel_statistics(PanelPath(hidden, order, selection, panels, block, None), labels, shard, running)
        return running, Kept(block, 0, selection, panels)
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
    block, panels = kept.take() if kept else None, None
    both = kept.paths if kept and block is not None else None
    if block is None:
        both = _two_paths(hidden, shard, memory, selection)
    if both is not None:
        return _gradients_of_both(
            both, hidden, labels, shard, coefficients, both.room(hidden) if block is None else block, wanted,
            when_hidden_is_done=when_hidden_is_done,
        )  # fmt: skip
    step = _step(hidden, shard, memory)
    has_group = False
    first_kept = shard.classes
    if kept and block is not None:
        if kept.panels is not None:
            panels, has_group = kept.panels, True
        else:
            first_kept = kept.first
            step = max(1, min(step, shard.classes - first_kept))  # its memory is that of all blocks
    panels = panels or _panels(hidden, shard, memory, step, first_kept, selection)
    todo = [slice(first_kept, shard.classes)] * (first_kept < shard.classes)
    todo += _blocks(first_kept, step) if panels is None else []
    products = Products(None if selection is None else selection.count)
    order = None
    copied = False
    if selection is not None:
        hidden, order = _chosen(hidden, selection, shard, memory)
        copied = order is None
    # In half precision a copy of the hidden states that nobody needs any more has room for their gradient.
    overwrite = copied and when_hidden_is_done is None and wanted.hidden_dtype == hidden.dtype
    sums = _Sums(
        hidden, shard, wanted, products, order=order, one_block=len(todo) == 1 and panels is None, overwrite=overwrite
    )
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
            if rows is todo[-1] and panels is None and sums.of_hidden is not None:
                when_hidden_is_done(sums.of_hidden)
            sums.add_weight(rows, gradient)
    if panels is not None and selection is not None:
        if block is None:
            block = torch.empty((hidden.shape[0], padded(step)), dtype=shard.logits_dtype, device=hidden.device)
        path = PanelPath(
            hidden, order, selection, panels, block.view(shard.logits_dtype), None if has_group else selection.count
        )
        begun = sums.of_hidden is not None
        _add_panel_gradients(
            path, labels, shard, coefficients, sums, begun=begun, when_hidden_is_done=when_hidden_is_done
        )
    return ShardGradients(sums.of_hidden, sums.of_weight, sums.of_bias)


def _panels(
    hidden: torch.Tensor, shard: Shard, memory: Memory, step: int, classes: int, selection: Selection | None
) -> Panels | None:
    """Return how the first classes of a shard share the memory of a block; None where blocks come one by one.

    That is where all tokens are computed, and where a product wants a rounded copy of a block's weight.
    """
    if selection is None or shard.weight.dtype != hidden.dtype:
        return None
    return Panels.cut(classes, step, hidden.shape[0], selection.count, memory.panels)


def _two_paths(hidden: torch.Tensor, shard: Shard, memory: Memory, selection: Selection | None) -> TwoPaths | None:
    """Return the ways for all tokens and for some; None where one will do.

    That is where blocks are as wide beside a copy as without one, where there is no copy, and where `auto` looks at masks
    first. A rank of several sends its gradient beside the last product, of which there is none on a way that is empty.
    """
    if selection is None or memory.masked is not Masked.SKIP or not shard.is_whole:
        return None
    if hidden.is_cuda and not _TWO_PATHS_WERE_RUN_ON_A_GPU:
        return None
    if shard.weight.dtype != hidden.dtype or is_one_block(hidden, shard, memory) or not _copies(hidden, shard, memory):
        return None
    some = _step(hidden, shard, memory)
    beside = _of_sums(hidden) + _NUMBERS_OF_A_SELECTED_TOKEN * hidden.shape[0]
    whole = memory.classes_with(shard.bytes_of_a_class(hidden), beside, shard.classes)
    if whole <= some:
        return None
    return TwoPaths.cut(selection, shard.classes, whole, some, shard.logits_dtype, memory.panels)


def _panel_statistics(path: PanelPath, labels: torch.Tensor, shard: Shard, running: Statistics) -> None:
    """Add all panels to the running numbers; the first group of them stays in the block."""
    panels, selection = path.panels, path.selection
    weight, options = shard.part(slice(0, panels.classes))
    logits = path.block[:, : panels.width]
    products = PanelProducts(selection.count, panels)
    multiply = products.of_rows(path.hidden, weight.t(), out=logits, order=path.order)
    add = add_panel_statistics(
        logits, labels, shard.first_class, running, selection=selection, panels=panels, **options
    )
    for group in reversed(range(panels.number)):
        multiply(group)
        add(group)


def _gradients_of_both(
    both: TwoPaths,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    shard: Shard,
    coefficients: Coefficients,
    room: torch.Tensor,
    wanted: Wanted,
    *,
    when_hidden_is_done: Callable[[torch.Tensor], None] | None,
) -> ShardGradients:
    """Return the gradients that one of two ways gives; all else is as in `shard_gradients`.

    Both write to the same place, each as if it were the only one.
    """
    products = Products(both.selection.count)
    sums = _Sums(hidden, shard, wanted, products, order=None, one_block=False, overwrite=False)
    whole, some = both.through(hidden, room)
    _add_panel_gradients(whole, labels, shard, coefficients, sums, begun=False, when_hidden_is_done=None)
    _add_panel_gradients(some, labels, shard, coefficients, sums, begun=False, when_hidden_is_done=when_hidden_is_done)
    return ShardGradients(sums.of_hidden, sums.of_weight, sums.of_bias)


def _add_panel_gradients(
    path: PanelPath,
    labels: torch.Tensor,
    shard: Shard,
    coefficients: Coefficients,
    sums: _Sums,
    *,
    begun: bool,
    when_hidden_is_done: Callable[[torch.Tensor], None] | None,
) -> None:
    """Add the gradients of all panels to the sums.

    Args:
        path: the panels.
        labels: as in `shard_gradients`, as is all that is not named here.
        shard: whose first classes the panels are.
        coefficients: of all tokens.
        sums: what was found of other classes, if anything.
        begun: whether something of the hidden states' gradient was.
        when_hidden_is_done: called before the last product.
    """
    panels, selection, block = path.panels, path.selection, path.block
    products = PanelProducts(selection.count, panels)
    weight, options = shard.part(slice(0, panels.classes))
    logits, gradient = block[:, : panels.width], block.view(path.hidden.dtype)[:, : panels.width]
    if path.first_rows is not None:
        first = PanelProducts(path.first_rows, panels)
        first.of_rows(path.hidden, weight.t(), out=logits, order=path.order)(0)
    multiply = products.of_rows(path.hidden, weight.t(), out=logits, order=path.order)
    turn = panel_gradients(
        logits, labels, shard.first_class, coefficients, gradient, selection=selection, panels=panels, **options
    )
    add = sums.of_panels(path, products, gradient, weight, begun=begun)
    # Groups that are empty come between the first one and the others, so that the last one has work.
    groups = [0, *range(panels.number - 1, 0, -1)]
    for group in groups:
        if group:
            multiply(group)
        turn(group)
        add.bias(group)
        add.hidden(group)
        if group == groups[-1] and when_hidden_is_done is not None and sums.of_hidden is not None:
            when_hidden_is_done(sums.of_hidden)
        add.weight(group)


class _PanelSums(NamedTuple):
    """What adds the gradients of one group of panels to the sums."""

    bias: Callable[[int], None]
    weight: Callable[[int], None]
    hidden: Callable[[int], None]


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

    def of_panels(
        self, path: PanelPath, products: PanelProducts, gradient: torch.Tensor, weight: torch.Tensor, *, begun: bool
    ) -> _PanelSums:
        """Return what adds one group of panels, of the shard's first classes; the first group comes first.

        Without `begun` it writes the gradient of the hidden states, to where it is if there is one.
        """
        classes, found = slice(0, products.panels.classes), _PanelSums(_nothing, _nothing, _nothing)
        if self.of_bias is not None:
            found = found._replace(bias=products.sum_rows(gradient, out=self.of_bias[classes]))
        adds = self._wanted.main_grad is not None
        out = self._wanted.main_grad if adds else self.of_weight
        if out is not None:
            of_weight = products.over_rows(gradient, path.hidden, out=out[classes], add=adds, order=path.order)
            found = found._replace(weight=of_weight)
        if self._wanted.hidden:
            room = self.of_hidden = self._room() if self.of_hidden is None else self.of_hidden
            first, later = (products.across(gradient, weight, out=room, add=add) for add in (begun, True))
            found = found._replace(hidden=lambda group: later(group) if group else first(group))
        return found

    def _room(self) -> torch.Tensor:
        if self._overwrite:
            return self._hidden
        room: torch.Tensor = torch.empty(self._hidden.shape, dtype=self._dtype, device=self._hidden.device)
        return room


def _nothing(_group: int) -> None:
    """Add what is not wanted."""


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
