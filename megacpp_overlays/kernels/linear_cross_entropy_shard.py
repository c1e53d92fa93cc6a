"""Linear cross entropy over the part of a vocabulary that one rank holds, a block of classes at a time.

The blocks run along the vocabulary because then each block of the weight gradient is one product over all tokens,
summed in float32 and rounded once, and only the gradient of the hidden states is added up between blocks, in float32.
Peak extra memory is the logits of one block in float32 and their gradient in the dtype of the hidden states, beside
the float32 gradient of the hidden states and one block's share of it.

cuBLAS through torch and the Triton passes of `vocabulary_softmax`; no host synchronisation.
"""

from __future__ import annotations

import torch

from megacpp_overlays.kernels.vocabulary_softmax import add_statistics, logits_gradient, start_statistics

_LOGITS = 1 << 26
"""Logits that one block holds, 256 MiB in float32. More would not make the products any faster."""
_NARROWEST = 256
"""Classes of a block, however many tokens there are: narrower products leave the device idle."""

_SUMS_WIDE = hasattr(torch.ops.aten.mm, "dtype")
"""Whether a product can be asked for in another dtype: torch 2.8 and newer, on CUDA."""


def classes_per_block(tokens: int) -> int:
    """Return how many classes share one block of logits."""
    return max(_NARROWEST, _LOGITS // max(tokens, 1) // _NARROWEST * _NARROWEST)


def shard_statistics(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, first_class: int, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the loss needs to know of this shard's logits.

    Args:
        hidden: (tokens, hidden size).
        weight: (classes of this shard, hidden size), same dtype.
        labels: (tokens,), integer, contiguous; over the whole vocabulary.
        first_class: the label of the shard's first class.
        step: classes in a block.

    Returns:
        float32 tensors of shape (tokens,): the highest logit here, the sum of exp(logit - highest) here, and the
        logit of the token's own class, 0 where another shard has it.
    """
    running = start_statistics(hidden.shape[0], hidden.device)
    for start in range(0, weight.shape[0], step):
        logits = _product(hidden, weight[start : start + step].t())
        add_statistics(logits, labels, first_class + start, *running)
        del logits  # or two blocks would be alive at once
    return running


def shard_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    maximum: torch.Tensor,
    accumulate: torch.Tensor,
    scale: torch.Tensor,
    *,
    first_class: int,
    step: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this shard's share of the gradient for `hidden`, and the gradient for `weight`.

    The gradient of the logits is formed in float32 and rounded once, to the dtype of `hidden`, for the products. In
    float16 small ones vanish there unless the loss is scaled, as they do in upstream's entry.

    Args:
        hidden: (tokens, hidden size).
        weight: (classes of this shard, hidden size), same dtype.
        labels: (tokens,), integer, contiguous; over the whole vocabulary.
        maximum: highest logit over the whole vocabulary, (tokens,), float32.
        accumulate: sum of exp(logit - highest) over the whole vocabulary, (tokens,), float32.
        scale: gradient of each token's loss, (tokens,), float32.
        first_class: the label of the shard's first class.
        step: classes in a block.

    Returns:
        (tokens, hidden size) in float32, and the shape and dtype of `weight`.
    """
    tokens = hidden.shape[0]
    hidden_gradient = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    weight_gradient = torch.empty_like(weight)
    block = torch.empty((tokens, min(step, weight.shape[0])), dtype=hidden.dtype, device=hidden.device)
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        logits = _product(hidden, weight[rows].t())
        gradient = block[:, : logits.shape[1]]
        logits_gradient(logits, labels, first_class + start, maximum, accumulate, scale, out=gradient)
        del logits
        hidden_gradient += _product(gradient, weight[rows])
        torch.mm(gradient.t(), hidden, out=weight_gradient[rows])
    return hidden_gradient, weight_gradient


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the product in float32, summed in float32, of two matrices of one dtype.

    Where torch cannot say so, the factors are widened, which is as exact and slower.
    """
    if left.dtype == torch.float32:
        return left @ right
    if left.is_cuda and _SUMS_WIDE:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
