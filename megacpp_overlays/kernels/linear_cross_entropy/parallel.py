"""The two passes of a linear cross entropy over all shards of a vocabulary, with their communication between ranks.

Rank r of a tensor-parallel group of R holds classes r * n to (r + 1) * n. Every rank has the labels of all tokens, and
computes the same losses; so all ranks skip the same tokens, without communication about them. In the forward pass the ranks
exchange two or three numbers a token; in the backward pass the gradient of the hidden states, in float32, during the
last product of the weight gradient. With sequence parallelism a rank holds one share of the tokens: hidden states are
gathered first, and their gradient is scattered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import distributed

from megacpp_overlays.kernels.linear_cross_entropy.block_sizes import is_one_block
from megacpp_overlays.kernels.linear_cross_entropy.memory import Masked, Memory
from megacpp_overlays.kernels.linear_cross_entropy.shard import GradientRequest, KeptLogits, Shard, ShardGradients
from megacpp_overlays.kernels.linear_cross_entropy.shard_passes import shard_gradients, shard_statistics
from megacpp_overlays.kernels.masked_products.products import available
from megacpp_overlays.kernels.masked_products.token_selection import Selection, select
from megacpp_overlays.kernels.vocabulary_softmax.numbers import Coefficients, Statistics
from megacpp_overlays.kernels.vocabulary_softmax.passes import plain_coefficients, plain_losses


@dataclass(frozen=True, slots=True)
class Group:
    """A tensor-parallel group, and this rank's place in it."""

    handle: distributed.ProcessGroup | None = None
    rank: int = 0
    ranks: int = 1
    sequence_parallel: bool = False

    @classmethod
    def of(cls, handle: distributed.ProcessGroup | None, *, sequence_parallel: bool = False) -> Group:
        """Return the description of torch's process group; None means this process alone."""
        if handle is None:
            return cls()
        return cls(handle, distributed.get_rank(handle), distributed.get_world_size(handle), sequence_parallel)

    @property
    def scatters(self) -> bool:
        """Whether a rank holds one share of the tokens."""
        return self.sequence_parallel and self.ranks > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The definition of a token's loss; see `reference.token_losses`."""

    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    """A negative share counts as none."""
    softcap: float | None = None
    token_scaling: bool = False

    @property
    def smoothing(self) -> float:
        """The share that is spread evenly."""
        return max(0.0, self.label_smoothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """This rank's share of an output layer, and the weights of all classes."""

    weight: torch.Tensor
    """(classes of this rank, hidden size)."""
    bias: torch.Tensor | None = None
    """(classes of this rank,)."""
    class_weight: torch.Tensor | None = None
    """(all classes,)."""
    logits_dtype: torch.dtype | None = None
    """Of a block of logits; None means that of the hidden states."""

    def shard(self, terms: Terms, group: Group, dtype: torch.dtype) -> Shard:
        """Return the part of the layer that the passes over this rank's classes take."""
        first = group.rank * self.weight.shape[0]
        spread = self.class_weight if terms.smoothing else None
        return Shard(
            weight=self.weight,
            bias=None if self.bias is None else self.bias.contiguous(),
            class_weight=None if spread is None else spread[first : first + self.weight.shape[0]].contiguous(),
            first_class=first,
            softcap=terms.softcap,
            logits_dtype=self.logits_dtype or dtype,
            is_whole=group.ranks == 1,
        )


@dataclass(frozen=True, slots=True)
class Forward:
    """Results of a forward pass."""

    losses: torch.Tensor
    """(tokens,), float32 (float64 for float64); the z-loss included, 0 where ignored."""
    z_losses: torch.Tensor | None
    """(tokens,): the part of the losses that is the z-loss; None where there is none."""
    statistics: Statistics
    """Over the whole vocabulary. A token that was skipped has the highest logit 0, and as its sum of exponentials the
    number of ranks."""
    kept: KeptLogits | None
    """Logits of this shard: all of them, or the last block; None where no backward pass will use them."""


def as_labels(target: torch.Tensor) -> torch.Tensor:
    """Return labels in one dimension, in a dtype that holds every class and every `ignore_index`.

    Torch rounds a number that a tensor is compared with into the tensor's dtype: to bytes, -100 is class 156.
    """
    labels = target.reshape(-1).contiguous()
    return labels if labels.dtype == torch.int32 else labels.to(torch.int64)


def own_class_weight(labels: torch.Tensor, class_weight: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return the weight of each token's class, (tokens,); 0 where the label is `ignore_index`.

    A label that is no class is an error, negative ones included.
    """
    alive = labels != ignore_index
    own = class_weight.index_select(0, torch.where(alive, labels, 0).to(torch.int64))
    return torch.where(alive, own, 0)


def gather(hidden: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the hidden states of all tokens, along the first dimension."""
    if not group.scatters:
        return hidden
    whole = hidden.new_empty((hidden.shape[0] * group.ranks, *hidden.shape[1:]))
    distributed.all_gather_into_tensor(whole, hidden.contiguous(), group=group.handle)
    return whole


def forward_pass(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    layer: Layer,
    terms: Terms,
    group: Group,
    memory: Memory,
    *,
    comes_back: bool = True,
) -> Forward:
    """Return the losses, and the values that the backward pass needs.

    Args:
        hidden: those of all tokens, (tokens, hidden size), contiguous.
        labels: those of all tokens, (tokens,), integer, contiguous.
        layer: the output layer.
        terms: the definition of the loss.
        group: who holds the other shards.
        memory: the limit of a block of logits, and whether all of them are kept.
        comes_back: whether there will be a backward pass.
    """
    shard = layer.shard(terms, group, hidden.dtype)
    selection = None
    if memory.skips_labels and available(hidden.dtype, hidden, shard.weight):
        selection = select(labels != terms.ignore_index)
    if not comes_back:
        # There are no sums here. In half precision a copy of selected tokens takes as much as a sum in addition to its result.
        memory = replace(memory, masked=Masked.COMPUTE)
    keep = _kept_dtype(hidden, shard, memory) if comes_back else None
    found, block = shard_statistics(
        hidden, labels, shard, memory, spread=terms.smoothing > 0, keep=keep, selection=selection
    )
    kept = block if comes_back else None
    del block
    if group.ranks > 1:
        found = _reconcile(found, group)
    if _plain(layer, terms):
        return Forward(plain_losses(found, labels, terms.ignore_index), None, found, kept)
    alive = labels != terms.ignore_index
    lse = found.lse
    hard, soft, spread = _shares(labels, layer, terms, group, lse)
    losses = (hard + soft) * lse - hard * found.label_logit
    if found.spread_logits is not None:
        losses = losses - spread * found.spread_logits
    z_losses = None
    if terms.lse_square_scale:
        z_losses = terms.lse_square_scale * lse.square()
        losses = losses + z_losses
    if terms.token_scaling:
        probability = torch.exp(found.label_logit - lse)
        losses = losses * probability
        z_losses = None if z_losses is None else z_losses * probability
    return Forward(
        torch.where(alive, losses, 0.0),
        None if z_losses is None else torch.where(alive, z_losses, 0.0),
        found,
        kept,
    )


def backward_pass(
    gradient: torch.Tensor,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    statistics: Statistics,
    layer: Layer,
    terms: Terms,
    group: Group,
    memory: Memory,
    wanted: GradientRequest,
    *,
    kept: KeptLogits | None = None,
) -> ShardGradients:
    """Return the gradients for this rank's hidden states, weight and bias; None where not wanted.

    Args:
        gradient: that of each token's loss, (tokens,), floating.
        hidden: as in `forward_pass`, as is all else.
        statistics: of the forward pass.
        wanted: which gradients; `hidden_dtype` is the dtype that the caller gets.
        kept: logits of the forward pass, which are overwritten. None computes all of them again.
    """
    shard = layer.shard(terms, group, hidden.dtype)
    coefficients = _coefficients(gradient, labels, statistics, layer, terms, group)
    selection = _selection(hidden, labels, shard, coefficients, terms, memory, wanted)
    if kept is not None:
        kept.bring_first(selection)
    # A gradient that several ranks add up stays in float32 until it is whole.
    here = replace(wanted, hidden_dtype=statistics.maximum.dtype) if group.ranks > 1 else wanted
    put_back: Callable[[torch.Tensor], torch.Tensor] | None = None
    if selection is not None:
        # A gradient that is reduced over ranks needs its memory while a block is still allocated; a result needs it afterwards.
        put_back = functools.partial(selection.put_back, dtype=here.hidden_dtype, in_place=group.ranks > 1)
    reduction = _Reduction(group, put_back)
    found = shard_gradients(
        hidden,
        labels,
        shard,
        coefficients,
        memory,
        here,
        kept=kept,
        selection=selection,
        when_hidden_is_done=reduction.hook,
    )
    if found.of_hidden is None:
        return found
    return found._replace(of_hidden=reduction.result(found.of_hidden).to(wanted.hidden_dtype))


def _selection(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    shard: Shard,
    coefficients: Coefficients,
    terms: Terms,
    memory: Memory,
    wanted: GradientRequest,
) -> Selection | None:
    """Return the tokens that have a gradient; None where all are computed."""
    results = [] if wanted.main_grad is None else [wanted.main_grad]
    if not memory.may_skip or not available(hidden.dtype, hidden, shard.weight, *results):
        return None
    alive = coefficients.alive
    labelled = alive if memory.has_looked else labels != terms.ignore_index
    return select(alive) if memory.skips(alive, labelled) else None


def _kept_dtype(hidden: torch.Tensor, shard: Shard, memory: Memory) -> torch.dtype | None:
    """Return the dtype in which a forward pass keeps all logits, None where they are cut into blocks."""
    if is_one_block(hidden, shard, memory):
        return None
    keeps = memory.keeps(hidden.shape[0], shard.classes, hidden.element_size(), hidden.device)
    return hidden.dtype if keeps else None


def _plain(layer: Layer, terms: Terms) -> bool:
    """Return whether a loss is nothing but the log-sum-exp less the logit of the label.

    That case takes one small step in each pass: next to a small output layer, a dozen of them would show.
    """
    extras = (terms.smoothing, terms.lse_square_scale, terms.token_scaling)
    return layer.class_weight is None and not any(extras)


def _coefficients(
    gradient: torch.Tensor, labels: torch.Tensor, statistics: Statistics, layer: Layer, terms: Terms, group: Group
) -> Coefficients:
    if _plain(layer, terms):
        return plain_coefficients(statistics, labels, terms.ignore_index, gradient)
    lse = statistics.lse
    alive = labels != terms.ignore_index
    scale = torch.where(alive, gradient.to(lse.dtype), 0.0)
    if terms.token_scaling:
        scale = torch.where(alive, scale * torch.exp(statistics.label_logit - lse), 0.0)
    hard, soft, spread = _shares(labels, layer, terms, group, lse)
    # Not multiplied by a zero scale: the sums over the logits of padding may be infinite.
    live = scale != 0
    return Coefficients(
        lse,
        torch.where(live, scale * (hard + soft + 2 * terms.lse_square_scale * lse), 0.0),
        torch.where(live, scale * hard, 0.0),
        scale * spread if terms.smoothing else None,
    )


def _shares(
    labels: torch.Tensor, layer: Layer, terms: Terms, group: Group, like: torch.Tensor
) -> tuple[torch.Tensor | float, torch.Tensor | float, float]:
    """Return the factors of the terms of a loss: at the label, over all classes together, and at each class."""
    smoothing = terms.smoothing
    spread = smoothing / (layer.weight.shape[0] * group.ranks)
    if layer.class_weight is None:
        return 1 - smoothing, smoothing, spread
    own = own_class_weight(labels, layer.class_weight, terms.ignore_index).to(like.dtype)
    return (1 - smoothing) * own, spread * layer.class_weight.sum(dtype=like.dtype) if smoothing else 0.0, spread


def _reconcile(found: Statistics, group: Group) -> Statistics:
    """Return the numbers of every token over the whole vocabulary, from those of this rank's shard."""
    highest = found.maximum.clone()
    distributed.all_reduce(highest, op=distributed.ReduceOp.MAX, group=group.handle)
    parts = [found.accumulate * torch.exp(found.maximum - highest), found.label_logit]
    if found.spread_logits is not None:
        parts.append(found.spread_logits)
    sums = torch.stack(parts)
    distributed.all_reduce(sums, op=distributed.ReduceOp.SUM, group=group.handle)
    return Statistics(highest, *sums.unbind())


class _Reduction:
    """The sum over ranks of the hidden states' gradient, under way while the last product runs."""

    def __init__(self, group: Group, put_back: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """Reduce over a group the gradient that `put_back` returns."""
        self._group, self._put_back = group, put_back
        self._wait: Callable[[], object] = lambda: None
        self._whole: torch.Tensor | None = None
        self._share: torch.Tensor | None = None

    @property
    def hook(self) -> Callable[[torch.Tensor], None] | None:
        """The function to call before the last product; None where one rank has nothing to wait for."""
        return self._start if self._group.ranks > 1 else None

    def _start(self, gradient: torch.Tensor) -> None:
        group = self._group
        whole = gradient if self._put_back is None else self._put_back(gradient)
        self._whole = whole
        work: distributed.Work
        if group.ranks == 1:
            return
        if group.scatters and distributed.get_backend(group.handle) == "nccl":
            self._share = whole.new_empty((whole.shape[0] // group.ranks, *whole.shape[1:]))
            work = distributed.reduce_scatter_tensor(self._share, whole, group=group.handle, async_op=True)
        else:
            work = distributed.all_reduce(whole, group=group.handle, async_op=True)
        self._wait = work.wait

    def result(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of the sum.

        Args:
            gradient: the argument of `hook`, if there was one.
        """
        if self._whole is None:
            self._start(gradient)
        self._wait()
        if self._share is not None:
            return self._share
        assert self._whole is not None  # noqa: S101 - it was started
        if self._group.scatters:
            share = gradient.shape[0] // self._group.ranks
            # A copy, so that the gradient of the whole sequence is not kept alive by a part of it.
            return self._whole[self._group.rank * share : (self._group.rank + 1) * share].clone()
        return self._whole
