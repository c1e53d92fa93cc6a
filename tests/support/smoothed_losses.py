"""Run in a fresh interpreter: cross entropy with label smoothing on one rank, two and four that share a vocabulary; JSON.

    python tests/support/smoothed_losses.py FOLDER

The release is the one that is first on the path; MEGACPP_OVERLAY_TP_LABEL_SMOOTHING=on switches the overlay on. Four ranks are
forked, meet in the folder as `forked_ranks` says, and are assigned by Megatron itself. The expected result is plain cross entropy of PyTorch
in float64, with the probabilities that upstream's comment names.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import megacpp_overlays

# isort: split
import torch
from forked_ranks import DEVICE, at_most, bits, on_ranks

MODULE = "megatron.core.tensor_parallel.cross_entropy"
ID = "tp-label-smoothing"
RANKS = at_most(4)
TOKENS, BATCH, CLASSES = 5, 2, 24
SMOOTHINGS = (0.1, 0.7)


def numbers() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits [tokens, batch, classes], true classes [tokens, batch], and weights of the losses."""
    generator = torch.Generator().manual_seed(26)
    logits = 2 * torch.randn(TOKENS, BATCH, CLASSES, generator=generator)
    truth = torch.randint(CLASSES, (TOKENS, BATCH), generator=generator)
    weights = torch.rand(TOKENS, BATCH, generator=generator)
    return logits.to(DEVICE), truth.to(DEVICE), weights.to(DEVICE)


def plain(logits: torch.Tensor, truth: torch.Tensor, weights: torch.Tensor, smoothing: float) -> list[torch.Tensor]:
    """Return losses in float64, and gradients of the logits."""
    whole = logits.double().requires_grad_()
    wanted = torch.full_like(whole, smoothing / (CLASSES - 1)).scatter_(-1, truth[..., None], 1 - smoothing)
    flat = torch.nn.functional.cross_entropy(whole.flatten(0, 1), wanted.detach().flatten(0, 1), reduction="none")
    losses = flat.view_as(truth)
    (losses * weights).sum().backward()
    assert whole.grad is not None
    return [losses.detach(), whole.grad]


def own(whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of the classes."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return whole.chunk(ranks, dim=-1)[parallel_state.get_tensor_model_parallel_rank()]


def run(
    function: Any, logits: torch.Tensor, truth: torch.Tensor, weights: torch.Tensor, *more: Any, **named: Any
) -> list[torch.Tensor]:
    """Return losses and gradients of this rank's share of the logits, in their dtype."""
    leaf = own(logits).clone().requires_grad_()
    losses = function(leaf * 1, truth, *more, **named)
    (losses * weights).sum().backward()
    assert leaf.grad is not None
    return [losses.detach(), leaf.grad]


def apart(found: list[torch.Tensor], true: list[torch.Tensor]) -> list[float]:
    """Return how far losses are apart and how far gradients."""
    losses, slopes = true
    return [float((found[0] - losses).abs().max()), float((found[1] - own(slopes)).abs().max())]


def facts(module: ModuleType) -> dict[str, Any]:
    """Return the results of this rank."""
    entry = module.vocab_parallel_cross_entropy
    logits, truth, weights = numbers()
    given = (logits, truth, weights)
    elsewhere = truth.clone()
    elsewhere[0] = -100  # of no rank
    far = run(entry, logits * 200, truth, weights, 0.1)
    found = {str(each): run(entry, *given, each) for each in SMOOTHINGS}
    halves = run(entry, logits.bfloat16(), truth, weights, 0.1)
    true_halves = plain(logits.bfloat16(), truth, weights, 0.1)
    report: dict[str, Any] = {
        "apart": {name: apart(each, plain(*given, float(name))) for name, each in found.items()},
        "losses": {name: each[0].flatten().tolist() for name, each in found.items()},
        "sum": float(found["0.1"][1].sum()),
        "bits": bits(*found["0.1"]),
        "bfloat16": apart([each.float() for each in halves], true_halves),
        "of no rank": [each.tolist() for each in run(entry, logits, elsewhere, weights, 0.1)],
        "far": [str(far[0].flatten().tolist()), bool(far[1].isfinite().all())],
        "without smoothing": bits(*run(entry, *given), *run(entry, *given, 0.0)),
        "refused": refused(entry, given),
    }
    if "tp_group" in inspect.signature(entry).parameters:
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
        report["given"] = bits(*run(entry, *given, 0.1, tp_group=group))
        alone = [torch.distributed.new_group([rank]) for rank in range(RANKS)][torch.distributed.get_rank()]
        whole = logits.clone().requires_grad_()
        losses = entry(whole * 1, truth, 0.1, alone)
        (losses * weights).sum().backward()
        report["given, alone"] = bits(losses.detach(), whole.grad)
    return report


def refused(entry: Any, given: tuple[torch.Tensor, ...]) -> str | None:
    try:
        run(entry, *given, 1.5)
    except AssertionError as error:
        return type(error).__name__
    return None


def compiled(module: ModuleType) -> dict[str, Any]:
    """Return how far a compiled function is from the truth, and how many graphs it took."""
    import torch._dynamo.utils

    given = numbers()
    with torch.compiler.set_stance("default"):
        function = torch.compile(module.vocab_parallel_cross_entropy, backend="aot_eager", fullgraph=True)
        off = apart(run(function, *given, 0.1), plain(*given, 0.1))
    return {"apart": off, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


def _on_rank(module: ModuleType) -> dict[str, Any]:
    """Return the results of a rank."""
    from megatron.core import parallel_state

    found: dict[str, Any] = {}
    for ranks in (each for each in (1, 2, 4) if each <= RANKS):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        found[str(ranks)] = facts(module)
        if ranks == RANKS and "compiled" in sys.argv:
            found["compiled"] = compiled(module)
        parallel_state.destroy_model_parallel()
    return found


def main() -> None:
    """Answer on standard output."""
    torch.set_num_threads(1)
    module = importlib.import_module(MODULE)
    record = next(each for each in megacpp_overlays.audit().records if each.overlay.id == ID)
    if "compiled" in sys.argv:
        importlib.import_module("torch._dynamo")  # once, before ranks are forked
    ranks = on_ranks(RANKS, Path(sys.argv[1]), lambda _: _on_rank(module))
    sys.stdout.write(json.dumps({"decision": record.decision.value, "reason": record.reason, "ranks": ranks}))


if __name__ == "__main__":
    main()
