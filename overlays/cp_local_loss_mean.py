"""Divide the loss of a context parallel rank by the mean token count of its ranks: off unless its variable says `on`.

Without `calculate_per_token_loss`, `forward_step_calc_loss` divides the sum of the losses on a rank by the number of tokens that
the loss function counted there. Context parallel ranks hold parts of the same sequences, and DDP takes the mean over them.
So where a mask leaves one part more tokens than another, a token of the part with fewer weighs more, and a lone
token on one of n ranks gets an n-th of its gradient. One rank with the whole sequence would divide by all tokens.

The seam wraps the loss function, whose outputs upstream divides. It divides the loss by the mean of the ranks' counts, in place as
upstream does, and returns a count of one for upstream to divide by. The sum over ranks is one all-reduce of a number for each
microbatch. DDP's mean over ranks then is the sum of all losses over the number of all tokens. A loss function that counts the same on
all ranks, such as one that summed the counts already, gets upstream's loss to the bit. So do all other calls: per-token losses, two
outputs, one rank, non-loss data.

It is off by default because it changes a loss that a run may have been tuned for; pack 28 says by how much.
"""

from __future__ import annotations

import builtins
import contextlib
import math
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import cp_local_loss_mean as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.gradients import gradients
from megacpp_overlays.runtime.in_this_thread import Instead, answer


def _make(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def forward_step_calc_loss(
        model: Any,
        output_tensor: Any,
        loss_func: Any,
        config: Any,
        vp_stage: Any,
        collect_non_loss_data: Any,
        num_microbatches: Any,
        forward_data_store: Any,
        cp_group_size: Any = None,
        is_last_stage: Any = None,
    ) -> Any:
        counted = []

        def of_all_ranks(*args: Any, **kwargs: Any) -> Any:
            outputs = loss_func(*args, **kwargs)
            if len(outputs) != 3 or (group := _group(model, cp_group_size, module)) is None:
                return outputs
            loss, tokens, report = outputs
            counted.append(tokens)
            total = module.torch.as_tensor(tokens, device=loss.device).clone()
            module.torch.distributed.all_reduce(total, group=group)
            loss /= total.clamp(min=1) / group.size()
            return loss, module.torch.ones_like(total), report

        is_a_mean = loss_func is not None and not collect_non_loss_data and not config.calculate_per_token_loss
        output, tokens = original(
            model,
            output_tensor,
            of_all_ranks if is_a_mean else loss_func,
            config,
            vp_stage,
            collect_non_loss_data,
            num_microbatches,
            forward_data_store,
            cp_group_size,
            is_last_stage,
        )
        return output, counted[0] if counted else tokens

    return forward_step_calc_loss


def _group(model: Any, ranks: int | None, module: ModuleType) -> Any:
    """Return the context parallel group of a model, or None where a rank has whole sequences.

    Args:
        model: may be wrapped, and may know its groups.
        ranks: the schedule's number of ranks that share a sequence; None takes the number of the process groups.
        module: the target.

    Raises:
        RuntimeError: neither the model nor the process has a group of that size.
    """
    state = module.parallel_state
    if ranks is None:
        ranks = state.get_context_parallel_world_size()
    if ranks <= 1:  # 0 where there are no process groups
        return None
    while (groups := getattr(model, "pg_collection", None)) is None and hasattr(model, "module"):
        model = model.module
    for group in (getattr(groups, "cp", None), state.get_context_parallel_group(check_initialized=False)):
        if group is not None and group.size() == ranks:
            return group
    raise RuntimeError(
        f"{OVERLAY.id}: {ranks} context parallel ranks share the loss, and neither the model nor Megatron's parallel_state has a "
        f"group of {ranks}; {OVERLAY.variable}=off leaves the loss to upstream"
    )


_RANKS, _MICROBATCHES = 2, 2
_LOSSES = ((2.0, 4.0, 6.0), (3.0, 0.0, 0.0))
_COUNTED = (3, 1)
_ENOUGH = 1e-5
_PREDICTION = "megatron.core.transformer.multi_token_prediction"


def observe(module: ModuleType) -> Observation:
    """Simulate two ranks on the CPU that count three tokens and one, and check that the mean over ranks weighs tokens alike.

    The ranks are two rows of one tensor, and a sum over ranks is one over rows. Nothing is sent. Per-token losses must stay sums.
    """
    import torch

    seen, broken = [], False
    with torch.inference_mode(False), torch.enable_grad(), _two_ranks(module) as model:
        for per_token, divisor in ((False, sum(_COUNTED) * _MICROBATCHES), (True, _RANKS)):
            losses = torch.tensor(_LOSSES, dtype=torch.float32, device="cpu", requires_grad=True)
            counted = torch.tensor(_COUNTED, dtype=torch.int32, device="cpu")
            config = SimpleNamespace(calculate_per_token_loss=per_token, timers=None)
            said: list[Any] = []
            loss, tokens = module.forward_step_calc_loss(
                model,
                losses,
                lambda each, counted=counted: (each.sum(dim=-1), counted, "said"),
                config,
                None,
                False,
                _MICROBATCHES,
                said,
                _RANKS,
                True,
            )
            mean = loss.mean()
            (slopes,) = gradients(mean, losses)
            expected = [sum(map(sum, _LOSSES)) / divisor, *[1 / divisor] * losses.numel()]
            found = [mean.item(), *slopes.flatten().tolist()]
            broken |= tokens.tolist() != list(_COUNTED) or said != ["said"]
            broken |= not all(math.isclose(*each, abs_tol=_ENOUGH) for each in zip(found, expected, strict=True))
            seen.append(f"{found[0]:.4f} with slopes from {min(found[1:]):.4f} to {max(found[1:]):.4f}")
    return Observation(
        broken=broken,
        seen=f"two ranks that count 3 tokens and 1 have a mean loss of {seen[0]}, and {seen[1]} where losses are per token",
    )


@contextlib.contextmanager
def _two_ranks(module: ModuleType) -> Iterator[Any]:
    """Replace this thread's all-reduce by a sum over the rows of a tensor, and yield a model with a group of two ranks.

    Upstream's function imports a class of multi-token prediction. That import fails while Megatron itself is being imported, so this
    thread gets a placeholder.
    """
    group = SimpleNamespace(size=lambda: _RANKS)
    names, real = vars(module), builtins.__import__
    theirs = names["torch"]

    def all_reduce(tensor: Any, *_: Any, **__: Any) -> None:
        tensor.copy_(tensor.sum(dim=0).expand_as(tensor))

    def import_(name: str, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(MTPLossAutoScaler=None) if name == _PREDICTION else real(name, *args, **kwargs)

    distributed = Instead(theirs.distributed, all_reduce=answer(all_reduce, theirs.distributed.all_reduce))
    try:
        builtins.__import__ = answer(import_, real)
        names["torch"] = Instead(theirs, distributed=distributed)
        yield SimpleNamespace(pg_collection=SimpleNamespace(cp=group))
    finally:
        names["torch"] = theirs
        builtins.__import__ = real


OVERLAY = Overlay(
    id="cp-local-loss-mean",
    pack=28,
    title="divide the loss of a context parallel rank by the token count of all its ranks",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.OWN_COUNT: (Replacement(symbol=feature.FUNCTION, make=_make),)},
    unsupported={
        feature.OWN_COUNT_WITHIN: "forward_step of megatron-core 0.13 divides by itself, with no function to stand in front of: take 0.14.0 "
        "or newer, train with calculate_per_token_loss, or let loss functions sum their count"
    },
    witness=observe,
    self_test=observe,
    opt_in=True,
    symptoms=(
        "loss changes with the context parallel size",
        "loss with CP is not that of one rank, with masked tokens",
    ),
    concerns="context_parallel and not per_token_loss",
    breaks="with context parallelism a token weighs more where a rank's part of the sequence has fewer tokens that count",
    brief="weights of tokens over CP ranks",
    until="Megatron divides by all ranks' tokens",
    retire_when="forward_step_calc_loss divides by the number of tokens on all context parallel ranks",
    threads=(
        Thread(
            repository="NVIDIA/Megatron-LM", number=7452, state="open, opened 2026-09-17, seen 2026-11-23: finding 9"
        ),
        Thread(repository="NVIDIA/Megatron-LM", number=7513, state="open, opened 2026-09-19, seen 2026-11-23"),
    ),
    last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.14.0, 0.16.1, 0.17.1, 0.18.2 and 0.19.2, main "
    "d98e8a64dd and dev d48bd6be0a on one gloo rank, two and four; 0.1.0 to 0.19.2 read. H200, two NCCL ranks: 0.19.2",
)
