"""Megatron's cross entropy with label smoothing on tensor parallel ranks: is it what one rank computes?

The real `vocab_parallel_cross_entropy` gets the same logits on one rank, two and four, which are forked and meet with gloo.
Losses, and gradients of the logits, are held against plain cross entropy in float64 whose wanted probability is
`1 - label_smoothing` for the true class and the same for every other one, which is what upstream's comment says.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from megacpp_overlays.repro import Behaviour, Case

MODULE = "megatron.core.tensor_parallel.cross_entropy"
TOKENS, CLASSES, SMOOTHING = 6, 16, 0.1
RANKS = (1, 2, 4)
ROUNDING = 1e-5


def _run() -> Behaviour:
    module = importlib.import_module(MODULE)
    found = {ranks: _on(ranks, module) for ranks in RANKS}
    if max(found[1][0]["losses"], found[1][0]["slopes"]) > ROUNDING:
        raise RuntimeError(f"one rank does not compute what its comment says: {found[1]}")
    words = [
        f"{ranks} rank{'s'[: ranks > 1]}: losses up to {max(each['losses'] for each in every):.2g} off and "
        f"{max(each['mean'] for each in every) - min(each['mean'] for each in every):.2g} apart, gradients "
        f"up to {max(each['slopes'] for each in every):.2g} off, {sum(each['sum'] for each in every):+.2f} in sum for a token"
        for ranks, every in found.items()
    ]
    worst = max(each[what] for every in found.values() for each in every for what in ("losses", "slopes"))
    return Behaviour(broken=worst > ROUNDING, seen="; ".join(words))


def _on(ranks: int, module: ModuleType) -> list[dict[str, float]]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        started = [context.Process(target=_rank, args=(module, ranks, rank, folder)) for rank in range(ranks)]
        for each in started:
            each.start()
        for each in started:
            each.join()
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]


def _rank(module: ModuleType, ranks: int, rank: int, folder: str) -> None:
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    generator = torch.Generator().manual_seed(26)
    logits = torch.randn(TOKENS, 1, CLASSES, generator=generator)
    truth = torch.randint(CLASSES, (TOKENS, 1), generator=generator)
    share = slice(rank * CLASSES // ranks, (rank + 1) * CLASSES // ranks)
    own = logits[..., share].clone().requires_grad_()
    losses = module.vocab_parallel_cross_entropy(own * 1.0, truth, SMOOTHING)  # it writes to its logits
    losses.sum().backward()
    expected, slopes = _plain(logits, truth)
    found = {
        "losses": float((losses - expected).abs().max()),
        "mean": float(losses.mean()),
        "slopes": float((own.grad - slopes[..., share]).abs().max()),
        "sum": float(own.grad.sum() / TOKENS),
    }
    Path(folder, str(rank)).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def _plain(logits: Any, truth: Any) -> tuple[Any, Any]:
    """Return the losses [tokens, 1] in float64, and their gradients."""
    import torch

    whole = logits.double().requires_grad_()
    wanted = torch.full_like(whole, SMOOTHING / (CLASSES - 1)).scatter_(-1, truth[..., None], 1 - SMOOTHING)
    losses = torch.nn.functional.cross_entropy(whole[:, 0], wanted[:, 0].detach(), reduction="none")[:, None]
    losses.sum().backward()
    return losses.detach(), whole.grad


CASES = (
    Case(
        name="ranks-cpu",
        overlay="tp-label-smoothing",
        device="cpu",
        versions=("torch",),
        run=_run,
        targets=(MODULE,),
    ),
)
