"""Megatron's schedule on context parallel ranks: does a step learn what one rank with the whole sequences would learn?

The real `forward_step` runs a small model over two microbatches on one rank, two and four, which are forked and meet with gloo. Ranks
hold two chunks of each sequence, one from either end, as Megatron gives them out. The loss function is the launcher's: the sum
over the tokens that a mask leaves, how many those are, and a report. Compared are the mean over ranks of loss and gradients,
which is what DDP makes, and what the report adds up to, where all tokens count, the last third of each sequence, and one alone.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Case

MODULE = "megatron.core.pipeline_parallel.schedules"
SEQUENCES, TOKENS, CLASSES, HIDDEN, MICROBATCHES = 2, 24, 11, 5, 2
RANKS = (1, 2, 4)
ROUNDING = 1e-5
"""Relative, of the largest gradient."""
MASKS = {"all tokens count": 0, "the last third does": 16, "one token does": None}
"""From which token on sequences count; None for the last token of one of them."""


def _run() -> Behaviour:
    module = importlib.import_module(MODULE)
    found = {ranks: _on(ranks, module) for ranks in RANKS}
    words, apart = [], []
    for ranks in RANKS[1:]:
        clauses = []
        for mask, one in found[1].items():
            every = found[ranks][mask]
            off = _off(every["slopes"], one["slopes"])
            apart += [off, abs(every["loss"] - one["loss"]), abs(every["reported"] - one["reported"])]
            clauses.append(
                f"{mask}: mean loss {every['loss']:.4f} and gradients {_times(every['slopes'], one['slopes']):.3f} times as large, {off:.1e} off"
            )
        words.append(f"{ranks} ranks instead of one, where {'; '.join(clauses)}")
    losses = ", ".join(f"{one['loss']:.4f}" for one in found[1].values())
    right = all(each <= ROUNDING for each in apart)  # 0.14 has NaN on a rank without tokens
    return Behaviour(broken=not right, seen=f"mean losses of one rank {losses}; {'; '.join(words)}")


def _off(found: list[float], expected: list[float]) -> float:
    """Return how far gradients are off, as a part of the largest."""
    return max(abs(one - other) for one, other in zip(found, expected, strict=True)) / max(map(abs, expected))


def _times(found: list[float], expected: list[float]) -> float:
    """Return how much of the expected gradients is in those that were found."""
    along = sum(one * other for one, other in zip(found, expected, strict=True))
    return along / sum(each * each for each in expected)


def _on(ranks: int, module: ModuleType) -> Any:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        started = [context.Process(target=_rank, args=(module, ranks, rank, folder)) for rank in range(ranks)]
        for each in started:
            each.start()
        for each in started:
            each.join()
        return json.loads(Path(folder, "found").read_text())


def _rank(module: ModuleType, ranks: int, rank: int, folder: str) -> None:
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    found = {mask: _step(module, first, ranks, rank) for mask, first in MASKS.items()}
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _step(module: ModuleType, first: int | None, ranks: int, rank: int) -> dict[str, Any]:
    """Return loss, gradients and reported loss of a step, as the mean over ranks."""
    import torch

    generator = torch.Generator().manual_seed(27)
    embedding = torch.nn.Embedding(CLASSES, HIDDEN, _weight=torch.randn(CLASSES, HIDDEN, generator=generator))
    output = torch.nn.Linear(HIDDEN, CLASSES, bias=False)
    output.load_state_dict({"weight": torch.randn(CLASSES, HIDDEN, generator=generator)})
    model = torch.nn.Sequential(embedding, output)
    model.set_input_tensor = lambda _: None
    config = SimpleNamespace(calculate_per_token_loss=False, timers=None, enable_autocast=False)
    reports: list[Any] = []
    loss = torch.zeros(())
    for _ in range(MICROBATCHES):
        tokens = torch.randint(CLASSES, (SEQUENCES, TOKENS + 1), generator=generator)
        mask = torch.zeros(SEQUENCES, TOKENS)
        if first is None:
            mask[0, -1] = 1
        else:
            mask[:, first:] = 1
        own = [_part(each, ranks, rank) for each in (tokens[:, :-1], tokens[:, 1:], mask)]
        step = (lambda _, model, own=own: _forward(model, *own), None, model, MICROBATCHES, None, reports, config, ranks)
        returned, _ = module.forward_step(*step)
        loss = loss + returned[0] if isinstance(returned, list) else loss + returned
    loss.backward()
    sums = torch.stack(reports).sum(dim=0)
    slopes = torch.cat([each.grad.flatten() for each in model.parameters()])
    torch.distributed.all_reduce(sums)
    means = [each.detach() / ranks for each in (loss, slopes)]
    for each in means:
        torch.distributed.all_reduce(each)
    return {"loss": float(means[0]), "slopes": means[1].tolist(), "reported": float(sums[0] / sums[1])}


def _forward(model: Any, tokens: Any, labels: Any, mask: Any) -> Any:
    """Return losses [sequences, tokens], and the launcher's loss function."""
    import torch

    losses = torch.nn.functional.cross_entropy(model(tokens).transpose(1, 2), labels, reduction="none")

    def loss_func(output: Any) -> Any:
        loss, counted = torch.sum(output * mask), mask.sum().to(torch.int)
        return loss, counted, torch.stack([loss.detach().clone(), counted.float()])

    return losses, loss_func


def _part(whole: Any, ranks: int, rank: int) -> Any:
    """Return a rank's two chunks of sequences [sequences, tokens], one from either end."""
    import torch

    chunks = whole.chunk(2 * ranks, dim=1)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim=1) if ranks > 1 else whole


CASES = (
    Case(
        name="ranks-cpu",
        overlay="cp-local-loss-mean",
        device="cpu",
        versions=("torch",),
        run=_run,
        targets=(MODULE,),
    ),
)
