"""Two passes over a block of logits: what a softmax needs to know of them, and the gradient of a cross entropy.

A block is (tokens, classes) of a vocabulary that is cut into blocks. The first pass adds a block to three running
numbers for each token; after the last block they determine the loss and every probability. The second pass takes
these numbers and turns a block into its gradient.

Triton, float32 arithmetic; any CUDA device of capability 8 and above, and CPU tensors in the Triton interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WIDEST = 4096
"""Classes that one program holds at a time."""
_LOWEST = torch.finfo(torch.float32).min
"""A running maximum before the first class. Finite, so that no difference of two maxima is undefined."""


def start_statistics(tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the running numbers of no class at all.

    Returns:
        Three float32 tensors of shape (tokens,): the highest logit, the sum of exp(logit - highest), and the logit
        of the token's own class, which is 0 until its block came by.
    """
    maximum = torch.full((tokens,), _LOWEST, dtype=torch.float32, device=device)
    return maximum, torch.zeros_like(maximum), torch.zeros_like(maximum)


def add_statistics(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first_class: int,
    maximum: torch.Tensor,
    accumulate: torch.Tensor,
    label_logit: torch.Tensor,
) -> None:
    """Add a block of logits to the running numbers, in place.

    Args:
        logits: (tokens, classes), float32, rows of unit stride.
        labels: (tokens,), integer, contiguous.
        first_class: the number that a label has for the first column of the block.
        maximum: see `start_statistics`, as are the next two.
    """
    tokens, classes = logits.shape
    if tokens == 0:
        return
    block = _block(classes)
    _statistics[(tokens,)](
        logits,
        logits.stride(0),
        labels,
        maximum,
        accumulate,
        label_logit,
        first_class,
        classes,
        BLOCK=block,
        num_warps=_warps(block),
    )


def logits_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first_class: int,
    maximum: torch.Tensor,
    accumulate: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write scale * (softmax - one at the label) of a block.

    A token whose scale is 0 gets zeros, whatever its logits are. The result is rounded once, to the dtype of `out`.

    Args:
        logits: (tokens, classes), float32, rows of unit stride.
        labels: (tokens,), integer, contiguous.
        first_class: the number that a label has for the first column of the block.
        maximum: highest logit over the whole vocabulary, (tokens,), float32.
        accumulate: sum of exp(logit - highest) over the whole vocabulary, (tokens,), float32.
        scale: gradient of each token's loss, (tokens,), float32.
        out: (tokens, classes), floating, rows of unit stride.
    """
    tokens, classes = logits.shape
    if tokens == 0:
        return
    block = _block(classes)
    _gradient[(tokens, triton.cdiv(classes, block))](
        logits,
        logits.stride(0),
        labels,
        maximum,
        accumulate,
        scale,
        out,
        out.stride(0),
        first_class,
        classes,
        BLOCK=block,
        num_warps=_warps(block),
    )


def _block(classes: int) -> int:
    return min(_WIDEST, 1 << (classes - 1).bit_length())


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))


# `first_class` differs from block to block; compiling anew for a round number would cost more than it gains.
@triton.jit(do_not_specialize=["first_class"])  # type: ignore[untyped-decorator]
def _statistics(  # type: ignore[no-untyped-def]
    logits,
    stride,
    labels,
    maximum,
    accumulate,
    label_logit,
    first_class,
    classes,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # a block may have more than 2**31 elements
    logits += row * stride
    highest = tl.load(maximum + row)
    total = tl.load(accumulate + row)
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = tl.load(logits + column, mask=column < classes, other=float("-inf"))
        above = tl.maximum(highest, tl.max(values, axis=0))
        total = total * tl.exp(highest - above) + tl.sum(tl.exp(values - above), axis=0)
        highest = above
    tl.store(maximum + row, highest)
    tl.store(accumulate + row, total)
    column = tl.load(labels + row).to(tl.int64) - first_class
    here = (column >= 0) & (column < classes)
    tl.store(label_logit + row, tl.load(logits + column, mask=here, other=0.0), mask=here)


@triton.jit(do_not_specialize=["first_class"])  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    logits,
    logits_stride,
    labels,
    maximum,
    accumulate,
    scale,
    out,
    out_stride,
    first_class,
    classes,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < classes
    own = tl.load(labels + row).to(tl.int64) - first_class
    factor = tl.load(scale + row)
    values = tl.load(logits + row * logits_stride + column, mask=inside, other=float("-inf"))
    probability = tl.exp(values - tl.load(maximum + row)) / tl.load(accumulate + row)
    gradient = (probability - tl.where(column == own, 1.0, 0.0)) * factor
    gradient = tl.where(factor == 0.0, 0.0, gradient)
    tl.store(out + row * out_stride + column, gradient.to(out.dtype.element_ty), mask=inside)
