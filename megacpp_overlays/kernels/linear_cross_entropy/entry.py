"""Portable entry for Megatron's fused linear cross entropy: `forward` and `backward` with the signatures of its dispatcher.

The contract is that of `megatron.core.fusions.linear_cross_entropy.blackwell.entry` (Megatron-LM dev, 2026-02 to
2026-08):

- Hidden states are (tokens, size) or (sequence, batch, size), labels (tokens,) or (sequence, batch), the weight
  (classes of this rank, size); contiguous. The three are on one CUDA device.
- The loss of a token is the log of the sum of exp(logits) minus the logit of its label; 0 where the label is
  `ignore_index`. "none" gives it flat, (tokens,), also for three-dimensional hidden states; "sum" and "mean" give a
  tensor without dimensions. "mean" divides by the number of tokens that are not ignored; if there are none, the loss
  is NaN. Losses are float32.
- In a tensor-parallel group of more than one rank, rank r holds classes r * n to (r + 1) * n, and every rank has all
  labels. The highest logits are reduced with MAX, the sums of exponentials and the label's logit with SUM, and every
  rank returns the same loss.
- With sequence parallelism the hidden states are one rank's share of the first dimension. They are gathered along it,
  and the backward pass gets the gathered ones.
- The forward pass returns seven values: the loss; the highest logit and the sum of exponentials of every token over
  the whole vocabulary (float32; upstream's callers pass both to the backward pass and read neither); the number of
  tokens that are not ignored (int64, no dimensions); rank and size of the group (0 and 1 without one); and the hidden
  states of all tokens.
- The backward pass gets the gradient of the loss: per token for "none", else without dimensions. It adds up the
  gradient of the hidden states in float32, sums it over the group in float32, keeps this rank's share of the
  sequence, and only then rounds it to the dtype of the hidden states. The weight gradient has the weight's dtype.

This entry accepts more than upstream's: float32 (whose products follow torch's TF32 setting), any sizes, labels of any
integer dtype, and a gradient of any strides. It differs as follows:

- The highest logit is never raised to 0. Raising it could make sums of exponentials vanish.
- The mean over no token has gradients of 0, as in PyTorch, not NaN.
- The loss of a label outside the vocabulary is the log of the sum (upstream: the same in a group, undefined without one).
- Logits of ignored tokens may overflow, as long as their hidden states are finite.
- If `memory` lets ignored tokens be skipped, their hidden states may have any values. A skipped token has the highest
  logit 0, and as its sum of exponentials the number of ranks.

All ranks of a group must run the same entry, so a group may not mix GPU generations.

`LCE_FWD_VOCAB_SPLIT_SIZE` and `LCE_BWD_VOCAB_SPLIT_SIZE` set the number of classes in one block of logits, as they do
upstream. Without them `memory` limits the memory of a pass. Logits are float32, as upstream's are. Logits that are kept
between the passes have the dtype of the hidden states.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Literal

import torch
from torch import distributed

from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory, process_wide
from megacpp_overlays.kernels.linear_cross_entropy.parallel import (
    Group,
    Layer,
    Terms,
    as_labels,
    backward_pass,
    forward_pass,
    gather,
)
from megacpp_overlays.kernels.linear_cross_entropy.shard import GradientRequest, KeptLogits
from megacpp_overlays.kernels.vocabulary_softmax.numbers import Statistics
from megacpp_overlays.runtime.tensor_notes import TensorNotes

Reduction = Literal["none", "sum", "mean"]
Forward = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor]

_kept: TensorNotes[KeptLogits] = TensorNotes()
"""Logits of forward passes, by the tensor of their sums of exponentials: upstream passes this same object to the backward pass."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    tp_group: distributed.ProcessGroup | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    sequence_parallel: bool = False,
) -> Forward:
    """Return the loss and the values that the backward pass needs; see the module for shapes and dtypes.

    Raises:
        ValueError: the tensors are not all on one CUDA device, or one has a wrong shape, dtype or layout; the reduction is
            none of the three; LCE_FWD_VOCAB_SPLIT_SIZE is no integer.
    """
    _check_devices(hidden=hidden, weight=weight, labels=labels)
    found: Forward = forward_on_any_device(hidden, weight, labels, tp_group, reduction, ignore_index, sequence_parallel)
    return found


def backward(
    dlogprobs: torch.Tensor,
    global_hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    maximum: torch.Tensor,
    accu: torch.Tensor,
    num_valid_tokens: torch.Tensor,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    tp_group: distributed.ProcessGroup | None = None,
    tp_rank: int = 0,
    tp_world_size: int = 1,
    sequence_parallel: bool = False,
) -> Gradients:
    """Return the gradients for this rank's hidden states and for its weight; see the module.

    Raises:
        ValueError: the tensors are not all on one CUDA device; `dlogprobs` has a wrong shape; the reduction is none of
            the three; LCE_BWD_VOCAB_SPLIT_SIZE is no integer.
    """
    _check_devices(global_hidden=global_hidden, weight=weight, labels=labels, dlogprobs=dlogprobs)
    found: Gradients = backward_on_any_device(
        dlogprobs,
        global_hidden,
        weight,
        labels,
        maximum,
        accu,
        num_valid_tokens,
        reduction,
        ignore_index,
        tp_group,
        tp_rank,
        tp_world_size,
        sequence_parallel,
    )
    return found


@torch.no_grad()  # type: ignore[untyped-decorator]
def forward_on_any_device(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    tp_group: distributed.ProcessGroup | None,
    reduction: Reduction,
    ignore_index: int,
    sequence_parallel: bool,
) -> Forward:
    """Run `forward` without its check of devices, so that it works on a CPU too, if Triton kernels are interpreted."""
    _check_reduction(reduction)
    group = Group.of(tp_group, sequence_parallel=sequence_parallel)
    _check_layout(hidden, weight, labels, gathered=group.ranks if group.scatters else 1)

    global_hidden = gather(hidden, group)
    rows, flat_labels = global_hidden.view(-1, hidden.shape[-1]), as_labels(labels)
    with torch.autocast(hidden.device.type, enabled=False):  # autocast would round float32 logits
        found = forward_pass(rows, flat_labels, _layer(weight), Terms(ignore_index=ignore_index), group, _memory("FWD"))

    num_valid_tokens = (flat_labels != ignore_index).sum()
    loss = found.losses
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / num_valid_tokens
    maximum, accumulate = found.statistics.maximum, found.statistics.accumulate
    if found.kept is not None:
        _kept.set(accumulate, found.kept)
    return loss, maximum, accumulate, num_valid_tokens, group.rank, group.ranks, global_hidden


@torch.no_grad()  # type: ignore[untyped-decorator]
def backward_on_any_device(
    dlogprobs: torch.Tensor,
    global_hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    maximum: torch.Tensor,
    accu: torch.Tensor,
    num_valid_tokens: torch.Tensor,
    reduction: Reduction,
    ignore_index: int,
    tp_group: distributed.ProcessGroup | None,
    tp_rank: int,
    tp_world_size: int,
    sequence_parallel: bool,
) -> Gradients:
    """Run `backward` without its check of devices, so that it works on a CPU too, if Triton kernels are interpreted."""
    _check_reduction(reduction)
    rows, flat_labels = global_hidden.view(-1, global_hidden.shape[-1]), as_labels(labels)
    expected = tuple(flat_labels.shape) if reduction == "none" else ()
    if tuple(dlogprobs.shape) != expected:
        raise ValueError(f'dlogprobs is {tuple(dlogprobs.shape)}; reduction "{reduction}" needs {expected}')
    gradient = dlogprobs.float()
    if reduction == "mean":
        gradient = gradient / num_valid_tokens  # by 0 if all tokens are ignored, and these have no gradient

    with torch.autocast(global_hidden.device.type, enabled=False):
        d_hidden, d_weight, _ = backward_pass(
            gradient.expand(flat_labels.shape),
            rows,
            flat_labels,
            Statistics(maximum, accu, maximum),  # the label's logit is not read, so any tensor does
            _layer(weight),
            Terms(ignore_index=ignore_index),
            Group(tp_group, tp_rank, tp_world_size, sequence_parallel),
            _memory("BWD"),
            GradientRequest(hidden_dtype=global_hidden.dtype),
            kept=_kept.get(accu),
        )
    assert d_hidden is not None and d_weight is not None  # noqa: S101, PT018 - both were asked for
    return d_hidden.view(-1, *global_hidden.shape[1:]), d_weight


def _layer(weight: torch.Tensor) -> Layer:
    """Return the output layer of a weight, with logits in float32 as in upstream's kernels."""
    return Layer(weight=weight, logits_dtype=torch.float32)


def _memory(direction: str) -> Memory:
    """Return the process-wide choice of memory, with the block size in upstream's variable for `FWD` or `BWD`, if it is positive."""
    classes = int(os.environ.get(f"LCE_{direction}_VOCAB_SPLIT_SIZE", "0"))
    return replace(process_wide(), block_classes=max(classes, 0))


def _check_devices(**tensors: torch.Tensor) -> None:
    where = {name: tensor.device for name, tensor in tensors.items()}
    if len(set(where.values())) > 1 or any(device.type != "cuda" for device in where.values()):
        found = ", ".join(f"{name} on {device}" for name, device in where.items())
        raise ValueError(f"the fused linear cross entropy needs its tensors on one CUDA device: {found}")


def _check_reduction(reduction: str) -> None:
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"Invalid reduction: {reduction}")


def _check_layout(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, gathered: int) -> None:
    """Check shapes, dtypes and strides. Upstream's entry has assertions without a message for shapes and strides.

    Args:
        hidden: this rank's hidden states.
        weight: this rank's weight.
        labels: the labels of all tokens.
        gathered: number of ranks that each hold a share of the tokens.

    Raises:
        ValueError: one does not fit; the text names it.
    """
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)}"
    if (hidden.dim(), weight.dim(), labels.dim()) not in {(2, 2, 1), (3, 2, 2)} or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"these shapes do not fit together: {shapes}")
    if hidden.numel() // max(hidden.shape[-1], 1) * gathered != labels.numel():
        raise ValueError(f"there must be one label for each of the tokens of {gathered} rank(s): {shapes}")
    if hidden.dtype not in _DTYPES or weight.dtype != hidden.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}; both must be one of {_DTYPES}")
    if labels.is_floating_point():
        raise ValueError(f"labels are {labels.dtype}; they must be integers")
    loose = [
        name for name, one in (("hidden", hidden), ("weight", weight), ("labels", labels)) if not one.is_contiguous()
    ]
    if loose:
        raise ValueError(f"not contiguous: {', '.join(loose)}")
