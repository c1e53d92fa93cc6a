"""Linear cross entropy over the part of a vocabulary that one rank holds, a block of classes at a time.

The blocks run along the vocabulary because then each block of the weight gradient is one product over all tokens,
summed in float32 and rounded once, and only the gradient of the hidden states is added up between blocks, in float32,
by the product itself. A block's gradient takes the place of its logits. Or the logits are kept from the forward
pass, all of them, and there is one block.

Where tokens are selected, a block has their rows alone, one after the other, and its products end after them. How many
they are only the device knows, so the memory of a block is that of all tokens; where few are selected it holds several
blocks at a time, see `masked_products.panels`. A copy of selected tokens costs time for nothing where all are selected;
`two_paths` avoids that.

cuBLAS through torch and the passes of `vocabulary_softmax`; no host synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megacpp_overlays.kernels.linear_cross_entropy.block_sizes import (
    blocks,
    chosen_rows,
    panels_of,
    step_of,
    two_paths,
)
from megacpp_overlays.kernels.linear_cross_entropy.gradient_sums import GradientSums
from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory, padded
from megacpp_overlays.kernels.linear_cross_entropy.panel_path import PanelPath
from megacpp_overlays.kernels.linear_cross_entropy.path_buffer import allocate, keep_logits, panel_paths
from megacpp_overlays.kernels.linear_cross_entropy.shard import GradientRequest, KeptLogits, Shard, ShardGradients
from megacpp_overlays.kernels.linear_cross_entropy.two_paths import TwoPaths
from megacpp_overlays.kernels.masked_products.products import PanelProducts, Products
from megacpp_overlays.kernels.masked_products.token_selection import Selection
from megacpp_overlays.kernels.vocabulary_softmax.numbers import Coefficients, Statistics
from megacpp_overlays.kernels.vocabulary_softmax.passes import (
    add_panel_statistics,
    add_statistics,
    logits_gradient,
    panel_gradients,
    room_for_statistics,
)


def shard_statistics(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    shard: Shard,
    memory: Memory,
    *,
    spread: bool = False,
    keep: torch.dtype | None = None,
    selection: Selection | None = None,
) -> tuple[Statistics, KeptLogits]:
    """Return the statistics of this shard's logits for the loss, and the last block of them, which is in memory anyway.

    Args:
        hidden: (tokens, hidden size), contiguous.
        labels: (tokens,), integer, contiguous; over the whole vocabulary.
        shard: the output layer.
        memory: the limit of a block.
        spread: whether label smoothing asks for the sum of all logits.
        keep: dtype in which all logits are one block. None cuts them as the backward pass does.
        selection: the tokens whose logits are computed; see `vocabulary_softmax.passes` for the numbers of the others.
    """
    tokens = hidden.shape[0]
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    running = room_for_statistics(tokens, hidden.device, wide, spread=spread)
    dtype = keep or shard.logits_dtype
    step = shard.classes if keep else step_of(hidden, shard, memory)
    if not keep and (both := two_paths(hidden, shard, memory, selection)):
        buffer = allocate(both, hidden)
        for path in panel_paths(both, hidden, buffer):
            _panel_statistics(path, labels, shard, running)
        return running, KeptLogits(buffer, 0, selection, paths=keep_logits(both))
    products = Products(None if selection is None else selection.count)
    order = None
    if selection is not None:
        hidden, order = chosen_rows(hidden, selection, shard, memory)
    block = torch.empty((tokens, padded(step)), dtype=dtype, device=hidden.device)
    panels = None if keep else panels_of(hidden, shard, memory, step, shard.classes, selection)
    if panels is not None and selection is not None:
        _panel_statistics(PanelPath(hidden, order, selection, panels, block, None), labels, shard, running)
        return running, KeptLogits(block, 0, selection, panels)
    rows = slice(0)
    for rows in blocks(shard.classes, step):
        weight, options = shard.part(rows)
        logits = block[:, : weight.shape[0]]
        products.of_rows(hidden, weight.to(hidden.dtype).t(), out=logits, order=order)
        first_class, first = shard.first_class + rows.start, rows.start == 0
        add_statistics(logits, labels, first_class, running, first=first, selection=selection, **options)
    return running, KeptLogits(block, rows.start, selection)


def shard_gradients(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    shard: Shard,
    coefficients: Coefficients,
    memory: Memory,
    wanted: GradientRequest,
    *,
    kept: KeptLogits | None = None,
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
        coefficients: the results of the passes over all shards.
        memory: the limit of the gradient of the hidden states and a block together.
        wanted: which gradients.
        kept: logits of the forward pass, which are overwritten; of the same selection. The others are computed again;
            without it, all are.
        selection: the tokens that have a gradient; None computes all.
        when_hidden_is_done: called with the gradient of the hidden states as soon as it is complete, before the
            last product, so that communication can run at the same time.
    """
    block, panels = kept.take() if kept else None, None
    both = kept.paths if kept and block is not None else None
    if block is None:
        both = two_paths(hidden, shard, memory, selection)
    if both is not None:
        return _gradients_of_both(
            both, hidden, labels, shard, coefficients, allocate(both, hidden) if block is None else block, wanted,
            when_hidden_is_done=when_hidden_is_done,
        )  # fmt: skip
    step = step_of(hidden, shard, memory)
    has_group = False
    first_kept = shard.classes
    if kept and block is not None:
        if kept.panels is not None:
            panels, has_group = kept.panels, True
        else:
            first_kept = kept.first
            step = max(1, min(step, shard.classes - first_kept))  # its memory is that of all blocks
    panels = panels or panels_of(hidden, shard, memory, step, first_kept, selection)
    todo = [slice(first_kept, shard.classes)] * (first_kept < shard.classes)
    todo += blocks(first_kept, step) if panels is None else []
    products = Products(None if selection is None else selection.count)
    order = None
    copied = False
    if selection is not None:
        hidden, order = chosen_rows(hidden, selection, shard, memory)
        copied = order is None
    # In half precision a copy of the hidden states that is no longer needed has room for their gradient.
    overwrite = copied and when_hidden_is_done is None and wanted.hidden_dtype == hidden.dtype
    sums = GradientSums(
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
    buffer: torch.Tensor,
    wanted: GradientRequest,
    *,
    when_hidden_is_done: Callable[[torch.Tensor], None] | None,
) -> ShardGradients:
    """Return the gradients, from whichever of two paths the device runs.

    Both paths write to the same sums, each as if it were the only one.

    Args:
        both: the plan of the paths.
        hidden: as in `shard_gradients`, as is all that is not named here.
        buffer: memory for either path, (bytes,), uint8. It has the logits that the plan does not compute again.
    """
    products = Products(both.selection.count)
    sums = GradientSums(hidden, shard, wanted, products, order=None, one_block=False, overwrite=False)
    dense, compact = panel_paths(both, hidden, buffer)
    for path, done in ((dense, None), (compact, when_hidden_is_done)):
        _add_panel_gradients(path, labels, shard, coefficients, sums, begun=False, when_hidden_is_done=done)
    return ShardGradients(sums.of_hidden, sums.of_weight, sums.of_bias)


def _add_panel_gradients(
    path: PanelPath,
    labels: torch.Tensor,
    shard: Shard,
    coefficients: Coefficients,
    sums: GradientSums,
    *,
    begun: bool,
    when_hidden_is_done: Callable[[torch.Tensor], None] | None,
) -> None:
    """Add the gradients of all panels to the sums.

    Args:
        path: the panels.
        labels: as in `shard_gradients`, like all other arguments that are not described here.
        shard: whose first classes the panels are.
        coefficients: of all tokens.
        sums: the gradients of other classes so far, if any.
        begun: whether the sums hold a part of the hidden states' gradient.
        when_hidden_is_done: called before the last product.
    """
    panels, selection, block = path.panels, path.selection, path.block
    products = PanelProducts(selection.count, panels)
    weight, options = shard.part(slice(0, panels.classes))
    logits, gradient = block[:, : panels.width], block.view(path.hidden.dtype)[:, : panels.width]
    if path.recomputed_rows is not None:
        first = PanelProducts(path.recomputed_rows, panels)
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
