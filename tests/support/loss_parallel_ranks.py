"""Run in a fresh interpreter: results of losses under `loss_parallel` with the seams of pack 60, and neighbours without and with them; JSON.

Ranks are copies of this process, which must not have run a backward pass before.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from placed_seams import placed, without_overlays
from places import ROOT
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megacpp_overlays.feature_probes.loss_parallel_log_softmax import IDENTITY, TARGET
from megacpp_overlays.overlays.loss_parallel_log_softmax import OVERLAY
from megacpp_overlays.repro import beside, neighbour

FOLDER = ROOT / "packs/60-loss-parallel-log-softmax"
PACK = beside(str(FOLDER / "neighbours.py"))


def softmax_twice(logits: Any, _teacher: Any, labels: Any) -> Any:
    """Cross entropy of logarithms of probabilities, which takes log_softmax once more."""
    return torch.nn.functional.cross_entropy(PACK._log_softmax(logits), labels)


def two_cross_entropies(logits: Any, _teacher: Any, labels: Any) -> Any:
    """Two losses of the same logarithms: their gradients are added before they reach log_softmax."""
    found = PACK._log_softmax(logits)
    losses = (
        torch.nn.functional.nll_loss(found, labels),
        torch.nn.functional.nll_loss(found, (labels + 1) % PACK.CLASSES),
    )
    return losses[0] + 2 * losses[1]


def changed_on_the_way(logits: Any, _teacher: Any, labels: Any) -> Any:
    """A hook that adds to the gradient of the logarithms."""
    found = PACK._log_softmax(logits)
    found.register_hook(lambda gradient: gradient + found.detach())
    return torch.nn.functional.nll_loss(found, labels)


def preference(logits: Any, _teacher: Any, labels: Any) -> Any:
    """The loss of DPO and ORPO: logarithms of chosen and rejected tokens, by weights of classes."""
    one = torch.nn.functional.one_hot(labels, PACK.CLASSES).to(logits.dtype)
    weights = 2 * one - one.roll(1, 0)
    found = PACK._log_softmax(logits)
    if isinstance(found, DTensor):
        weights = distribute_tensor(weights, found.device_mesh, [Shard(1)])
    return -(weights * found).sum().tanh()


def main() -> None:
    """Answer on standard output."""
    neighbours = neighbour.load(FOLDER)
    losses = {
        **PACK.LOSSES,
        **{each.__name__: each for each in (softmax_twice, two_cross_entropies, changed_on_the_way, preference)},
    }
    with without_overlays(TARGET.module) as module:
        without = [neighbour.measured(each) for each in neighbours]
        with placed(OVERLAY, IDENTITY, module):
            found = [neighbour.measured(each) for each in neighbours]
            off = {dtype: _apart(PACK.LOSSES, dtype) for dtype in ("float32", "bfloat16", "float16")}
            off["float64"] = _apart(losses, "float64")
    problems = {
        each.name: neighbour.problem(each, one, other)
        for each, one, other in zip(neighbours, without, found, strict=True)
    }
    sys.stdout.write(json.dumps({"neighbours": problems, "off": off}))


def _apart(losses: dict[str, Any], dtype: str) -> dict[str, float]:
    found = PACK.gradients(losses, dtype)
    return {name: PACK.apart(found, name) for name in losses}


if __name__ == "__main__":
    main()
