"""Steps of DSA's fused indexer loss through the installed Megatron, as the loader leaves it: results in a file.

    python indexer_steps.py DEVICE SIZES FILE

SIZES is QUERIES,BATCH,HEADS,DIM; there are as many keys as queries, and sixteen attention heads of 64.
"""

from __future__ import annotations

import importlib
import math
import sys
from types import SimpleNamespace
from typing import Any

SCALE, COEFFICIENT = 0.125, 0.5
VARIANTS = {
    "dense": {"sparse_loss": False, "use_relu": True},
    "dense, no relu": {"sparse_loss": False, "use_relu": False},
    "sparse": {"sparse_loss": True, "use_relu": True},
}
OVERLAY = "dsa-indexer-streaming"


def inputs_of(queries: int, batch: int, heads: int, dim: int, device: str) -> list[Any]:
    """Return q, weights, k, query and key, the same numbers in every process, and a causal mask."""
    import torch

    generator = torch.Generator().manual_seed(5)
    shapes = (
        (queries, batch, heads, dim),
        (queries, batch, heads),
        (queries, batch, dim),
        (queries, batch, 16, 64),
        (queries, batch, 16, 64),
    )
    scales = (dim**-0.5, heads**-0.5, 1.0, 1.0, 1.0)
    made = [torch.randn(shape, generator=generator) * by for shape, by in zip(shapes, scales, strict=True)]
    mask = torch.full((queries, queries), -math.inf).triu(1)
    return [*(each.bfloat16().to(device) for each in made), mask.to(device)]


def truth(q: Any, weights: Any, k: Any, query: Any, key: Any, mask: Any, *, use_relu: bool) -> tuple[Any, ...]:
    """Return loss and gradients of the dense loss in float64."""
    import torch

    from megacpp_overlays.kernels.index_scores import reference

    exact, mask = [each.double() for each in (q, weights, k)], mask.double()
    scores = reference.scores(*exact, use_relu=use_relu) + mask
    attention = torch.einsum("sbnd,tbnd->bnst", query.double(), key.double()) * SCALE + mask
    target = torch.softmax(attention, dim=-1).mean(dim=1)
    by = COEFFICIENT / (scores.size(0) * scores.size(1))
    terms = torch.where(mask == 0, target * (target.log() - torch.log_softmax(scores, dim=-1)), 0.0)
    return terms.sum() * by, *reference.gradients((torch.softmax(scores, dim=-1) - target) * by, *exact, use_relu)


def main() -> None:
    """Run every variant twice; keep loss, gradients, whether both runs gave the same bits, and the peak of memory."""
    import megacpp_overlays  # first, as in a launcher

    device, sizes, file = sys.argv[1:]
    import torch

    loss = importlib.import_module("megatron.core.transformer.experimental_attention_variant.dsa").FusedDSAIndexerLoss
    group = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    q, weights, k, query, key, mask = inputs_of(*map(int, sizes.split(",")), device)
    leaves = [each.requires_grad_() for each in (q, weights, k)]
    topk = q.size(0) // 4
    cuda = device == "cuda"

    def step(sparse_loss: bool, use_relu: bool) -> tuple[Any, ...]:
        arguments = (*leaves, query, key, SCALE, topk, COEFFICIENT, mask, sparse_loss, group)
        found = loss.apply(*arguments, None, None, None, None, False, use_relu)[1]
        return found.detach(), *torch.autograd.grad(found, leaves)

    results = {}
    for name, variant in VARIANTS.items():
        first = step(**variant)
        before = 0
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        second = step(**variant)
        results[name] = {
            "found": [each.cpu() for each in second],
            "same bits": all(torch.equal(one, other) for one, other in zip(first, second, strict=True)),
            "peak": torch.cuda.max_memory_allocated() - before if cuda else 0,
        }
    records = {record.overlay.id: record.decision.value for record in megacpp_overlays.audit().records}
    torch.save({"steps": results, "decision": records[OVERLAY]}, file)


if __name__ == "__main__":
    main()
