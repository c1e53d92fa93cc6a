"""Two passes over a block of logits: the statistics for a cross entropy, and the gradient of the logits.

A block is (tokens, classes) of a vocabulary that is cut into blocks. The first pass adds a block to some running
numbers for each token; after the last block they determine the loss and every probability. The second pass takes the
coefficients that follow from these numbers and turns a block into its gradient.

Where tokens are selected a block has rows of those alone, one after the other; all that is (tokens,) has a number for
every token in its own place all the same.

Triton on CUDA devices, and on CPU tensors in the Triton interpreter; plain PyTorch everywhere else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType

import torch

from megacpp_overlays.kernels.devices import launching_there, on_device_of
from megacpp_overlays.kernels.masked_products.panels import Panels
from megacpp_overlays.kernels.masked_products.token_selection import Selection
from megacpp_overlays.kernels.vocabulary_softmax import in_torch
from megacpp_overlays.kernels.vocabulary_softmax.numbers import Coefficients, Statistics

in_triton: ModuleType | None
try:
    from megacpp_overlays.kernels.vocabulary_softmax import in_triton
except ImportError:  # no Triton here
    in_triton = None


def room_for_statistics(
    tokens: int, device: torch.device, wide: torch.dtype = torch.float32, *, spread: bool = False
) -> Statistics:
    """Return running numbers that hold nothing yet; the first block writes them.

    Args:
        tokens: how many.
        device: of the numbers.
        wide: dtype of the arithmetic, float32 or float64.
        spread: whether label smoothing will ask for the sum of all logits.
    """
    return Statistics(*torch.empty((4 if spread else 3, tokens), dtype=wide, device=device).unbind())


def add_statistics(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first_class: int,
    statistics: Statistics,
    *,
    first: bool,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    softcap: float | None = None,
    selection: Selection | None = None,
) -> None:
    """Add a block of logits to the running numbers, in place. A shard has one block or more.

    Args:
        logits: (tokens, classes), floating, rows of unit stride.
        labels: (tokens,), integer, contiguous.
        first_class: the number that a label has for the first column of the block.
        statistics: see `room_for_statistics`.
        first: whether this is the first block, before which the numbers hold nothing.
        bias: (classes,), contiguous; added to the logits.
        class_weight: (classes,), contiguous; only the spread logits are weighted.
        softcap: bound of the logits, applied after the bias.
        selection: the tokens that the first rows of the block belong to; later rows are not read. The first block
            gives the other tokens the highest logit 0, a sum of exponentials of 1, and 0 else. Where its count is
            `row_counts.NOTHING` no number changes, here and in the other passes.
    """
    with on_device_of(logits):
        _passes(logits).add_statistics(
            logits, labels, first_class, statistics, first, bias, class_weight, softcap, selection
        )


def logits_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first_class: int,
    coefficients: Coefficients,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    softcap: float | None = None,
    selection: Selection | None = None,
) -> None:
    """Write the gradient of a block.

    A token whose coefficients are all 0 gets zeros, whatever its logits are. The result is rounded once, to the dtype
    of `out`.

    Args:
        logits: (tokens, classes), floating, rows of unit stride.
        labels: (tokens,), integer, contiguous.
        first_class: the number that a label has for the first column of the block.
        coefficients: in float32 for logits up to float32.
        out: (tokens, classes), floating, rows of unit stride. It may be the logits themselves, or the start of each
            row's memory in an element that is not wider.
        bias: as in `add_statistics`, as are the next two.
        class_weight: (classes,).
        softcap: bound of the logits.
        selection: the tokens that the first rows of the block belong to; others have coefficients of 0. Rows after
            them get zeros as far as `row_counts.ROW_ALIGNMENT` says, and later ones stay as they are.
    """
    with on_device_of(logits):
        _passes(logits).logits_gradient(
            logits, labels, first_class, coefficients, bias, class_weight, softcap, out, selection
        )


def add_panel_statistics(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first_class: int,
    statistics: Statistics,
    *,
    selection: Selection,
    panels: Panels,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    softcap: float | None = None,
) -> Callable[[int], None]:
    """Return a function that adds one group of panels to the running numbers: the last group first.

    Args:
        logits: (tokens, classes of a panel), floating, rows of unit stride; panel below panel.
        labels: (tokens,), integer, contiguous.
        first_class: the number that a label has for the first column of the first panel.
        statistics: as in `add_statistics`.
        selection: the tokens that the first rows of each panel belong to.
        panels: where they are.
        bias: (classes of all panels,), contiguous.
        class_weight: (classes of all panels,), contiguous.
        softcap: bound of the logits, applied after the bias.
    """
    add: Callable[[int], None] = _passes(logits).add_panel_statistics(
        logits, labels, first_class, statistics, bias, class_weight, softcap, selection, panels
    )
    return launching_there(logits, add)


def panel_gradients(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first_class: int,
    coefficients: Coefficients,
    out: torch.Tensor,
    *,
    selection: Selection,
    panels: Panels,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    softcap: float | None = None,
) -> Callable[[int], None]:
    """Return a function that writes the gradients of one group of panels.

    Args:
        logits: as in `add_panel_statistics`, as is all else.
        labels: (tokens,).
        first_class: of the first panel.
        coefficients: as in `logits_gradient`.
        out: (tokens, classes of a panel); as in `logits_gradient`. Rows after the selected ones get zeros in each panel
            as far as `row_counts.ROW_ALIGNMENT` says, and in Triton so do columns after the classes of the last one,
            up to the next multiple of that.
        selection: the tokens that the first rows of each panel belong to.
        panels: where they are.
        bias: (classes of all panels,).
        class_weight: (classes of all panels,).
        softcap: bound of the logits.
    """
    write: Callable[[int], None] = _passes(logits).panel_gradients(
        logits, labels, first_class, coefficients, bias, class_weight, softcap, out, selection, panels
    )
    return launching_there(logits, write)


def plain_losses(statistics: Statistics, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return the log-sum-exp less the logit of the label, (tokens,); 0 where the label is `ignore_index`."""
    with on_device_of(labels):
        losses: torch.Tensor = _passes(statistics.maximum).plain_losses(statistics, labels, ignore_index)
        return losses


def plain_coefficients(
    statistics: Statistics, labels: torch.Tensor, ignore_index: int, gradient: torch.Tensor
) -> Coefficients:
    """Return the coefficients of the logits' gradient for gradients of such losses.

    Args:
        statistics: over the whole vocabulary.
        labels: (tokens,), integer, contiguous.
        ignore_index: as in `plain_losses`.
        gradient: that of each token's loss, (tokens,), floating, any stride.
    """
    with on_device_of(labels):
        lse, scale = _passes(statistics.maximum).plain_coefficients(statistics, labels, ignore_index, gradient)
        return Coefficients(lse, scale, scale)


def _passes(logits: torch.Tensor) -> ModuleType:
    on_device = logits.is_cuda or (logits.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")
    return in_triton if in_triton is not None and on_device and logits.dtype != torch.float64 else in_torch
