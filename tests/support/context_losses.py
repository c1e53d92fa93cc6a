"""Run in a fresh interpreter: steps of Megatron's schedule on one, two and four context parallel ranks; JSON.

    python tests/support/context_losses.py FOLDER

The release is the one that is first on the path; MEGACPP_OVERLAY_CP_LOCAL_LOSS_MEAN=on switches the overlay on. Four ranks are
forked, meet in the folder as `forked_ranks` says, and are assigned by Megatron itself. The expected result is the mean of the losses of all
tokens of a microbatch that count, in float64 on whole sequences.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import megacpp_overlays

# isort: split
import torch
from forked_ranks import DEVICE, at_most, bits, on_ranks

MODULE = "megatron.core.pipeline_parallel.schedules"
ID = "cp-local-loss-mean"
RANKS = at_most(4)
SEQUENCES, TOKENS, MICROBATCHES = 2, 24, 3
MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda place: place >= 0,
    "last third": lambda place: place >= 16,
    "one alone": lambda place: place == 23,
    "none": lambda place: place < 0,
}


def numbers(mask: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return losses [sequences, tokens] and which of them count."""
    generator = torch.Generator().manual_seed(27)
    losses = torch.rand(SEQUENCES, TOKENS, generator=generator)
    counts = MASKS[mask](torch.arange(TOKENS)).expand(SEQUENCES, -1).float()
    return losses.to(DEVICE), counts.to(DEVICE)


def own(whole: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return this rank's two chunks of the sequences, one from either end."""
    from megatron.core import parallel_state

    rank = parallel_state.get_context_parallel_rank()
    chunks = whole.chunk(2 * ranks, dim=1)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim=1) if ranks > 1 else whole


class Step:
    """A microbatch on this rank."""

    def __init__(self, module: ModuleType, ranks: int, mask: str, **options: Any) -> None:
        whole, counts = numbers(mask)
        self.leaf = own(whole, ranks).clone().requires_grad_()
        self.counted = own(counts, ranks)
        self.options = options
        self.reports: list[Any] = []
        config = SimpleNamespace(
            calculate_per_token_loss=options.get("per_token", False), timers=None, enable_autocast=False
        )
        model = options.get("model") or torch.nn.Identity()
        model.set_input_tensor = lambda _: None
        if options.get("unsaid"):  # as the combined schedule calls it
            losses = self.leaf * 1
            called = (model, losses, self.loss_func, config, None, False, MICROBATCHES, self.reports)
            self.output, self.tokens = module.forward_step_calc_loss(*called)
            return
        self.output, self.tokens = module.forward_step(
            lambda _, __: (self.leaf * 1, None if options.get("no_function") else self.loss_func),
            None,
            model,
            MICROBATCHES,
            None,
            self.reports,
            config,
            options.get("said", ranks),
            collect_non_loss_data=options.get("no_loss", False),
        )

    def loss_func(self, losses: torch.Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return losses.detach()
        self.loss = torch.sum(losses * self.counted)
        counted = self.counted.sum().to(torch.int)
        if "summed" in self.options:  # as loss functions of the releases before 0.13.0 do
            torch.distributed.all_reduce(counted, group=self.options["summed"])
            self.loss = self.loss * self.options["summed"].size()
        report = torch.stack([self.loss.detach().clone(), counted.float()])
        self.given = int(counted) if self.options.get("number") else counted
        return (self.loss, report) if self.options.get("two") else (self.loss, self.given, report)

    def bits(self) -> str:
        """Return a hash of loss and gradients."""
        self.output.backward()
        return bits(self.output.detach(), self.gradients())

    def gradients(self) -> torch.Tensor:
        assert self.leaf.grad is not None
        return self.leaf.grad


def apart(step: Step, mask: str, ranks: int, group: Any) -> list[float]:
    """Return how far loss and gradients, as DDP makes the mean of them, are from the true ones."""
    step.output.backward()
    mean = step.output.detach() / ranks
    torch.distributed.all_reduce(mean, group=group)
    losses, counts = (each.double() for each in numbers(mask))
    divisor = counts.sum().clamp(min=1) * MICROBATCHES
    slopes = own(counts / divisor, ranks)
    return [
        abs(float(mean - (losses * counts).sum() / divisor)),
        float((step.gradients() / ranks - slopes).abs().max()),
    ]


def facts(module: ModuleType, ranks: int) -> dict[str, Any]:
    """Return the results of this rank."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    found: dict[str, Any] = {}
    found["apart"] = {mask: apart(Step(module, ranks, mask), mask, ranks, group) for mask in MASKS}
    step = Step(module, ranks, "last third")
    found["is the loss function's"] = [step.output is step.loss, step.tokens is step.given, len(step.reports)]
    found["counted"] = int(step.tokens)
    found["same"] = {
        "all": Step(module, ranks, "all").bits(),
        "summed": Step(module, ranks, "last third", summed=group).bits(),
        "per token": Step(module, ranks, "last third", per_token=True).bits(),
        "two": Step(module, ranks, "last third", two=True).bits(),
        "no loss": bits(Step(module, ranks, "last third", no_loss=True).reports[0]),
    }
    # A group whose two ranks hold the same parts: the mean of their counts is the count of each.
    if (ranks, RANKS) == (2, 4):
        pairs = [torch.distributed.new_group(each) for each in ([0, 2], [1, 3])]
        inner, wrapped = torch.nn.Identity(), torch.nn.Identity()
        inner.pg_collection = SimpleNamespace(cp=pairs[torch.distributed.get_rank() % 2])
        wrapped.module = inner
        found["the model's group"] = Step(module, ranks, "last third", model=wrapped).bits()
    found["last third"] = Step(module, ranks, "last third").bits()
    found["unsaid"] = Step(module, ranks, "last third", unsaid=True).bits()
    found["of another size"] = refused(module, ranks)
    if importlib.import_module("megatron.core").__version__ == "0.14.0":
        found["a plain number"] = apart(Step(module, ranks, "last third", number=True), "last third", ranks, group)
    else:
        found["no function"] = bits(Step(module, ranks, "last third", no_function=True).reports[0].detach())
    return found


def refused(module: ModuleType, ranks: int) -> str | None:
    try:
        Step(module, ranks, "last third", said=3)
    except RuntimeError as error:
        return str(error)
    return None


def _on_rank(module: ModuleType) -> dict[str, Any]:
    """Return the results of a rank."""
    from megatron.core import parallel_state

    found: dict[str, Any] = {}
    for ranks in (each for each in (1, 2, 4) if each <= RANKS):
        parallel_state.initialize_model_parallel(context_parallel_size=ranks)
        found[str(ranks)] = facts(module, ranks)
        parallel_state.destroy_model_parallel()
    return found


def main() -> None:
    """Answer on standard output."""
    torch.set_num_threads(1)
    module = importlib.import_module(MODULE)
    record = next(each for each in megacpp_overlays.audit().records if each.overlay.id == ID)
    ranks = on_ranks(RANKS, Path(sys.argv[1]), lambda _: _on_rank(module))
    sys.stdout.write(json.dumps({"decision": record.decision.value, "reason": record.reason, "ranks": ranks}))


if __name__ == "__main__":
    main()
