"""Steps of Megatron's schedule that are right without the overlay: on one rank, of ranks that count alike, of losses that are sums over
tokens, and of loss functions that count nothing or all ranks."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Neighbour, beside, on_ranks

PACK = beside(__file__)
PADDED, ALL_COUNT = (PACK.MASKS[name] for name in ("the last third does", "all tokens count"))

LossFunction = Callable[[Any, Any], Any]
"""Takes losses and a mask, [sequences, tokens of the rank]."""


def _counted(losses: Any, mask: Any) -> Any:
    """Return what a launcher's loss function does: the sum over tokens, how many there are, and a report."""
    import torch

    loss, tokens = torch.sum(losses * mask), mask.sum().to(torch.int)
    return loss, tokens, torch.stack([loss.detach().clone(), tokens.float()])


def _counted_by_all(losses: Any, mask: Any) -> Any:
    """Return the same with the mean of what all ranks count, as a loss function does that sums over ranks by itself."""
    import torch

    loss, tokens, report = _counted(losses, mask)
    total = tokens.float()
    torch.distributed.all_reduce(total)
    return loss, total / torch.distributed.get_world_size(), report


def _mean(losses: Any, mask: Any) -> Any:
    """Return a mean and a report, without a count."""
    loss = (losses * mask).sum() / mask.sum().clamp(min=1)
    return loss, loss.detach().clone()


def _learnt(ranks: int, first: int, loss_function: LossFunction, *, per_token: bool = False) -> Mapping[str, object]:
    """Return loss, count, report and gradients of a step, of each rank."""
    module = importlib.import_module(PACK.MODULE)

    def on_rank(rank: int) -> Mapping[str, Any]:
        import torch
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(context_parallel_size=ranks)
        generator = torch.Generator().manual_seed(28)
        tokens = torch.randint(PACK.CLASSES, (PACK.SEQUENCES, PACK.TOKENS + 1), generator=generator)
        model = torch.nn.Sequential(
            torch.nn.Embedding(PACK.CLASSES, PACK.HIDDEN), torch.nn.Linear(PACK.HIDDEN, PACK.CLASSES, bias=False)
        )
        for each in model.parameters():
            each.data = torch.randn(each.shape, generator=generator)
        model.set_input_tensor = lambda _: None
        mask = torch.zeros(PACK.SEQUENCES, PACK.TOKENS)
        mask[:, first:] = 1
        ids, labels, mask = (PACK._part(each, ranks, rank) for each in (tokens[:, :-1], tokens[:, 1:], mask))

        def forward(_: Any, model: Any) -> Any:
            losses = torch.nn.functional.cross_entropy(model(ids).transpose(1, 2), labels, reduction="none")
            return losses, lambda each: loss_function(each, mask)

        config = SimpleNamespace(calculate_per_token_loss=per_token, timers=None, enable_autocast=False)
        reports: list[Any] = []
        output, count = module.forward_step(forward, None, model, PACK.MICROBATCHES, None, reports, config, ranks)
        loss = output[0] if isinstance(output, list) else output
        loss.backward()
        slopes = {f"gradient {number}": each.grad for number, each in enumerate(model.parameters())}
        return {"loss": loss, "count": count, "report": reports[0], **slopes}

    return on_ranks(ranks, on_rank)


def _neighbour(name: str, *arguments: Any, **options: Any) -> Neighbour:
    run = functools.partial(_learnt, *arguments, **options)
    return Neighbour(name=name, overlay="cp-local-loss-mean", run=run)


NEIGHBOURS = (
    _neighbour("one-rank", 1, PADDED, _counted),
    _neighbour("ranks-that-count-alike", 2, ALL_COUNT, _counted),
    _neighbour("losses-per-token", 2, PADDED, _counted, per_token=True),
    _neighbour("no-count", 2, PADDED, _mean),
    _neighbour("counted-by-all-ranks", 2, PADDED, _counted_by_all),
)
