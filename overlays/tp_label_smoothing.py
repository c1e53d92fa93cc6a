"""Label smoothing over the whole vocabulary under tensor parallelism: off unless its variable is `on`.

With `label_smoothing` Megatron's `vocab_parallel_cross_entropy` gives each class but the true one a probability of
`label_smoothing / (K - 1)`. `K`, and the mean of the log-probabilities, are those of the rank's own part of the vocabulary.
So ranks return different losses, which all differ from the loss of a single rank. The gradients of classes other than the true
one are too large by at least the number of ranks. Most of this error is equal for all classes: it does not change the softmax, but it
changes gradients of hidden states and of the output layer's weights.

Upstream's forward pass runs without smoothing, and this seam adds the term of the whole vocabulary with one more sum over ranks,
a number for each token. Upstream's backward pass reads `K` from the context, and is right with the right `K`.
The reference is the result of one rank, including a loss that is infinite where a probability rounds to zero. Without smoothing,
on one rank, and where upstream refuses the factor, upstream's own function runs with the caller's arguments.

The overlay is off by default because it changes a loss that a run may have been tuned for; pack 26 has the size of the change.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import tp_label_smoothing as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.gradients import gradients
from megacpp_overlays.runtime.in_this_thread import Instead, answer


def _make_for_the_group(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    """Return the seam for releases that use the group of the process."""

    def forward(ctx: Any, vocab_parallel_logits: Any, target: Any, label_smoothing: Any = 0.0) -> Any:
        ranks = module.get_tensor_model_parallel_world_size() if 0.0 < label_smoothing < 1.0 else 1
        if ranks == 1:
            return original(ctx, vocab_parallel_logits, target, label_smoothing)
        upstream = _SavingContext()
        loss = original(upstream, vocab_parallel_logits, target, 0.0)
        return _smoothed(ctx, upstream, loss, label_smoothing, ranks, module, module.get_tensor_model_parallel_group())

    return forward


def _make_for_a_group(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    """Return the seam for releases whose callers may pass a group."""

    def forward(
        ctx: Any, vocab_parallel_logits: Any, target: Any, label_smoothing: Any = 0.0, tp_group: Any = None
    ) -> Any:
        group, ranks = tp_group, 1
        if 0.0 < label_smoothing < 1.0:
            group = module.get_tensor_model_parallel_group() if tp_group is None else tp_group
            ranks = module.get_pg_size(group)
        if ranks == 1:
            return original(ctx, vocab_parallel_logits, target, label_smoothing, tp_group)
        upstream = _SavingContext()
        loss = original(upstream, vocab_parallel_logits, target, 0.0, group)
        return _smoothed(ctx, upstream, loss, label_smoothing, ranks, module, group)

    return forward


class _SavingContext:
    """Stub of autograd's context for upstream's forward pass that exposes the saved tensors."""

    saved: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved = tensors


def _smoothed(
    ctx: Any, upstream: _SavingContext, loss: Any, label_smoothing: Any, ranks: int, module: ModuleType, group: Any
) -> Any:
    """Return the smoothed losses, and save the inputs of upstream's backward pass in the context.

    Args:
        ctx: autograd's.
        upstream: has the probabilities of the rank's classes, float32 [..., classes of the rank], and the other saved tensors.
        loss: without smoothing, float32 [...], the same on all ranks.
        label_smoothing: the probability that is spread over all classes but the true one.
        ranks: number of ranks that share the vocabulary; as in upstream, all of them have as many classes.
        module: the target.
        group: of these ranks.
    """
    torch = module.torch
    probabilities = upstream.saved[0]
    classes = probabilities.size(-1) * ranks
    smoothing = label_smoothing * classes / (classes - 1)  # over all classes, the true one included
    log_probabilities = torch.log(probabilities).sum(dim=-1)
    torch.distributed.all_reduce(log_probabilities, op=torch.distributed.ReduceOp.SUM, group=group)
    ctx.label_smoothing, ctx.vocab_size = label_smoothing, classes
    ctx.save_for_backward(*upstream.saved)
    return (1.0 - smoothing) * loss - smoothing / classes * log_probabilities


_RANKS = 2
_PROBABILITIES = (0.1, 0.2, 0.3, 0.4)
_TRUE_CLASS, _SMOOTHING = 2, 0.3
_ENOUGH = 1e-5


def observe(module: ModuleType) -> Observation:
    """Compare the loss and gradient of two simulated ranks with two classes each, on the CPU, with those of four classes.

    The ranks are two rows of one tensor, and a sum over ranks is a sum over rows. There is no communication.
    """
    import torch

    leaf = torch.tensor(_PROBABILITIES, dtype=torch.float32, device="cpu").log().view(_RANKS, -1)
    truth = torch.full((_RANKS,), _TRUE_CLASS, dtype=torch.int64, device="cpu")
    seen, broken = [], False
    with torch.inference_mode(False), torch.enable_grad(), _two_ranks(module):
        for smoothing in (_SMOOTHING, 0.0):
            own = leaf.clone().requires_grad_()
            losses = module.vocab_parallel_cross_entropy(own * 1.0, truth, smoothing)  # upstream writes to its logits
            (gradient,) = gradients(losses.sum(), own)
            others = smoothing / (len(_PROBABILITIES) - 1)
            wanted = [1.0 - smoothing if each == _TRUE_CLASS else others for each in range(len(_PROBABILITIES))]
            loss = -sum(share * math.log(each) for share, each in zip(wanted, _PROBABILITIES, strict=True))
            slopes = [each - share for share, each in zip(wanted, _PROBABILITIES, strict=True)]
            found = [*losses.tolist(), *gradient.flatten().tolist()]
            expected = [loss, loss, *slopes]
            broken |= len(found) != len(expected) or not all(
                math.isclose(one, other, abs_tol=_ENOUGH) for one, other in zip(found, expected, strict=False)
            )
            numbers = ", ".join(f"{each:.4f}" for each in found)
            seen.append(f"losses and gradients {numbers} with label smoothing {smoothing}")
    return Observation(broken=broken, seen=f"two ranks of two classes: {'; '.join(seen)}")


@contextlib.contextmanager
def _two_ranks(module: ModuleType) -> Iterator[None]:
    """Replace the module's functions about ranks, in this thread, by ones for the rows of a tensor."""
    import torch

    rows = torch.arange(_RANKS, device="cpu")
    group = SimpleNamespace(size=lambda: _RANKS, rank=lambda: rows)

    def all_reduce(tensor: Any, op: Any = torch.distributed.ReduceOp.SUM, **_: Any) -> None:
        whole = tensor.sum(dim=0) if op == torch.distributed.ReduceOp.SUM else tensor.amax(dim=0)
        tensor.copy_(whole.expand_as(tensor))

    answers: dict[str, Callable[..., Any]] = {
        "get_tensor_model_parallel_group": lambda *_, **__: group,
        "get_tensor_model_parallel_rank": lambda: rows,
        "get_tensor_model_parallel_world_size": lambda: _RANKS,
        "get_pg_rank": lambda *_: rows,
        "get_pg_size": lambda *_: _RANKS,
    }
    names = vars(module)
    before = {name: names[name] for name in ("torch", *answers) if name in names}
    theirs = before["torch"]
    distributed = Instead(theirs.distributed, all_reduce=answer(all_reduce, theirs.distributed.all_reduce))
    try:
        for name, ours in answers.items():
            if name in before:
                names[name] = answer(ours, before[name])
        names["torch"] = Instead(theirs, distributed=distributed)
        yield
    finally:
        names.update(before)


OVERLAY = Overlay(
    id="tp-label-smoothing",
    pack=26,
    title="smooth labels over the whole vocabulary where tensor parallel ranks share it",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={
        feature.OWN_SHARE: (Replacement(symbol=feature.FORWARD, make=_make_for_the_group),),
        feature.OWN_SHARE_OF_A_GROUP: (Replacement(symbol=feature.FORWARD, make=_make_for_a_group),),
    },
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=True,
    symptoms=(
        "loss differs between tensor parallel ranks with label smoothing",
        "label smoothing changes with the TP size",
    ),
    concerns="tensor_parallel",
    breaks="with label smoothing each tensor parallel rank has a loss of its own, and its gradients push classes too hard",
    brief="label smoothing under TP",
    until="Megatron smooths over all ranks",
    retire_when="vocab_parallel_cross_entropy smooths labels over the classes of all ranks",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=737, state="open, opened 2024-03-14, seen 2026-11-23"),
        Thread(repository="NVIDIA/Megatron-LM", number=7464, state="open, opened 2026-09-18, seen 2026-11-23"),
        Thread(repository="NVIDIA/Megatron-LM", number=7466, state="open, opened 2026-09-18, seen 2026-11-23"),
        Thread(repository="NVIDIA/Megatron-LM", number=5522, state="closed, opened 2026-06-27: not merged"),
    ),
    last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.14.0, 0.18.2 and 0.19.2, main d98e8a64dd and dev d48bd6be0a "
    "on one gloo rank, two and four; 0.13.0 to 0.19.2 read. H200, two NCCL ranks: 0.19.2",
)
