"""Training steps of a layer of sparse attention whose tokens are split over context-parallel ranks, as Megatron splits them.

A rank has two of twice as many chunks of a document, one from the front and one from the back. DSA gathers keys of attention and of
the indexer from all ranks and puts them into the order of their positions, so a rank holds its own queries, their choices and all keys.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import timing
import torch
import torch.distributed as dist
from dsa_training import work
from dsa_training.work import Size, Way

OURS = next(each for each in work.WAYS if each.name == "overlays")


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    device: str
    """cuda or cpu."""
    rank: int
    ranks: int


def answer_for_the_cpu() -> None:
    """Have Megatron run models on a CPU: it asks for CUDA's current device and random states, and takes a rank's angles to a GPU."""
    from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = lambda: torch.device("cpu")
    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()

    def own(angles: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        chunks = angles.chunk(2 * group.size(), dim)
        return torch.cat([chunks[group.rank()], chunks[-1 - group.rank()]], dim)

    for module in (rotary_pos_embedding, yarn_rotary_pos_embedding):
        module.get_pos_emb_on_this_cp_rank = own


@contextlib.contextmanager
def context_parallel(place: Place, ranks: int) -> Iterator[None]:
    """Have context-parallel groups of so many ranks."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    if place.device == "cuda":
        random.model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def split(document: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return this rank's tokens, labels and positions, (1, tokens / ranks) each, of a document, (1, tokens + 1)."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    positions = torch.arange(document.size(1) - 1, device=document.device)[None]
    whole = {"tokens": document[:, :-1], "labels": document[:, 1:], "position_ids": positions}
    group = parallel_state.get_context_parallel_group()
    found = get_batch_on_this_cp_rank(whole, is_hybrid_cp=False, cp_group=group)
    return found["tokens"], found["labels"], found["position_ids"]


def loaded(size: Size, way: Way, start: dict[str, torch.Tensor], device: str, ranks: int) -> Any:
    """Return a model with the weights that every way begins with."""
    made = work.model(size, way, device, ranks)
    with torch.no_grad():
        for name, each in made.named_parameters():
            each.copy_(start[name])
    return made


def gradients(
    size: Size, way: Way, start: dict[str, torch.Tensor], place: Place, ranks: int
) -> dict[str, torch.Tensor]:
    """Return the gradients of the first document on so many ranks, the mean over them, float32, by parameter."""
    document = work.documents(size, place.device)[0]
    with context_parallel(place, ranks):
        made = loaded(
            size, way, work.reordered(start, size, place.device) if way.reordered else start, place.device, ranks
        )
        loss_of(made, document).backward()
        found = {name: each.grad.float() for name, each in made.named_parameters()}
        if ranks > 1:
            for each in found.values():
                dist.all_reduce(each)
                each.div_(ranks)
    return in_order(found, size, place.device) if way.reordered else found


def in_order(found: dict[str, torch.Tensor], size: Size, device: str) -> dict[str, torch.Tensor]:
    """Return gradients of reordered weights as those of the weights."""
    places = {name: torch.arange(each.numel(), device=device).view(each.shape) for name, each in found.items()}
    moved = work.reordered(places, size, device)
    return {
        name: torch.empty_like(each).view(-1).scatter_(0, moved[name].reshape(-1), each.reshape(-1)).view(each.shape)
        for name, each in found.items()
    }


def apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return by parameter the norm of the difference over the norm of the expected gradient."""
    return {name: float((found[name] - each).norm() / each.norm()) for name, each in expected.items()}


def loss_of(made: Any, document: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of this rank's share of a document."""
    tokens, labels, positions = split(document)
    return made(tokens, positions, None, labels=labels).float().mean()


def train(size: Size, start: dict[str, torch.Tensor], place: Place, rate: float) -> dict[str, Any]:
    """Train a model under overlays on all ranks.

    Returns:
        `losses`, the means over ranks of each step; `ms`, the median of forward and backward of the later half of the steps, of the
        slowest rank; `mib`, the peak of memory above weights, gradients' and optimizer's state, of the rank that has most, None on a
        CPU.
    """
    with context_parallel(place, place.ranks):
        made = loaded(size, OURS, start, place.device, place.ranks)
        learnt = list(made.parameters())
        masters = [each.detach().float().clone() for each in learnt]
        optimizer = torch.optim.AdamW(masters, lr=rate, weight_decay=0.0)
        losses, taken, held = [], [], 0
        for step, document in enumerate(work.documents(size, place.device)):
            if step == 1 and place.device == "cuda":  # the optimizer's state is there
                held = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            dist.barrier()
            seen: list[torch.Tensor] = []

            def forward(document: torch.Tensor = document, seen: list[torch.Tensor] = seen) -> torch.Tensor:
                loss = loss_of(made, document)
                seen.append(loss.detach())
                return loss

            marks = timing.marked((forward, torch.Tensor.backward), place.device)
            timing.settle(place.device)
            taken.append(sum(timing.elapsed_ms(marks)))
            losses.append(float(mean(seen[0])))
            for master, each in zip(masters, learnt, strict=True):
                master.grad, each.grad = mean(each.grad.float()), None
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for master, each in zip(masters, learnt, strict=True):
                    each.copy_(master)
        peak = (torch.cuda.max_memory_allocated() - held) / 2**20 if place.device == "cuda" else 0.0
        most = torch.tensor([statistics.median(taken[len(taken) // 2 :]), peak], device=learnt[0].device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return {"losses": losses, "ms": float(most[0]), "mib": float(most[1]) if place.device == "cuda" else None}


def mean(tensor: torch.Tensor) -> torch.Tensor:
    """Write the mean over all ranks over a tensor, and return it."""
    dist.all_reduce(tensor)
    return tensor.div_(dist.get_world_size())
