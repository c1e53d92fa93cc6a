"""Workload of linear_cross_entropy_ranks.py on a rank: its place among the others, the inputs, and the ways.

Every rank makes the whole problem from one seed, so each can do the work of one GPU on its own, hold its shard of the
parallel result against that, and no input has to be sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import timing
import torch
import torch.distributed as dist
from linear_cross_entropy.work import IGNORED, Shape

from megacpp_overlays.kernels.linear_cross_entropy import linear_cross_entropy
from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory


@dataclass(frozen=True)
class Place:
    """One rank of a tensor-parallel group."""

    group: dist.ProcessGroup
    rank: int
    size: int
    device: torch.device

    def share(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the first dimension."""
        return whole.chunk(self.size)[self.rank]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        found = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def worst(self, numbers: dict[str, float]) -> dict[str, float]:
        """Return the largest of each number over all ranks."""
        every = self.gather(numbers)
        return {name: max(each[name] for each in every) for name in numbers}

    def line_up(self) -> None:
        """Let the devices wait for each other, without the hosts."""
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)


@dataclass(frozen=True)
class Problem:
    """Inputs of the whole problem, and the gradient of each token's loss: a random mask over the tokens that are not ignored."""

    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def draw(cls, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Problem:
        """Return the problem of a seed, which is the same on every device of one kind."""
        draw = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=draw, device=device, dtype=dtype)

        def uniform() -> torch.Tensor:
            return torch.rand(shape.tokens, generator=draw, device=device)

        target = torch.randint(shape.vocabulary, (shape.tokens,), generator=draw, device=device)
        kept = uniform() < 0.5
        return cls(
            hidden=normal(shape.tokens, shape.hidden),
            weight=normal(shape.vocabulary, shape.hidden).mul_(shape.hidden**-0.5),
            target=target.masked_fill_(uniform() < 0.05, IGNORED),
            scale=kept / kept.sum(),
        )


@dataclass(frozen=True)
class Way:
    """One way to do the work."""

    logits: str
    masked: str = "compute"
    parallel: bool = True
    sequence: bool = False

    @property
    def method(self) -> str:
        """How a rank does its part, in words."""
        return f"{self.logits}{', masked tokens skipped' * (self.masked == 'skip')}"

    def said(self, place: Place) -> str:
        """Return it in words."""
        return f"TP={place.size if self.parallel else 1}, {self.method}{', sequence parallel' * self.sequence}"

    def leaves(self, problem: Problem, place: Place) -> list[torch.Tensor]:
        """Return hidden and weight as this rank has them, as leaves of their own that share the memory."""
        hidden = place.share(problem.hidden) if self.sequence else problem.hidden
        weight = place.share(problem.weight) if self.parallel else problem.weight
        return [each.detach().requires_grad_() for each in (hidden, weight)]

    def loss(self, place: Place, *inputs: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the loss: hidden, weight and target are this rank's."""
        group = place.group if self.parallel else None
        options = {"reduction": "none", "ignore_index": IGNORED} | options
        memory = Memory(logits=self.logits, masked=self.masked)
        return linear_cross_entropy(*inputs, group=group, sequence_parallel=self.sequence, memory=memory, **options)

    def stages(self, problem: Problem, place: Place) -> timing.Stages:
        """Return forward and backward."""
        leaves = self.leaves(problem, place)
        return (
            lambda: self.loss(place, *leaves, problem.target),
            lambda loss: (loss.detach(), *torch.autograd.grad(loss, leaves, problem.scale)),
        )

    def run(self, problem: Problem, place: Place) -> tuple[torch.Tensor, ...]:
        """Return losses and gradients."""
        forward, backward = self.stages(problem, place)
        return backward(forward())

    def part(self, whole: tuple[torch.Tensor, ...], place: Place) -> tuple[torch.Tensor, ...]:
        """Return the expected results of this rank: its part of the losses and gradients of the whole problem."""
        losses, hidden, *rest = whole
        shares = [place.share(each) for each in rest]
        return losses, place.share(hidden) if self.sequence else hidden, *shares


METHODS = [(logits, masked) for logits in ("recompute", "keep") for masked in ("compute", "skip")]
PARALLEL = [Way(*method, sequence=sequence) for method in METHODS for sequence in (False, True)]
ALONE = [Way(*method, parallel=False) for method in METHODS]
