"""Run in a fresh interpreter: `seq_aux_loss` of packed samples on ranks of sequence parallelism, with overlays and without; JSON.

    python tests/support/packed_shards.py

The release is the one that is first on the path. The MoE layer of pack 32 runs forward and backward on two and on four gloo ranks, with samples
as a batch and as a packed row, and its router's balancing loss is the only source of gradients.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import megacpp_overlays

# isort: split
import torch
from forked_ranks import on_ranks
from places import ROOT

from megacpp_overlays.repro import neighbour

PACK = neighbour.beside(str(ROOT / "packs/32-seq-aux-loss-packed/neighbours.py"))
CONFIG = "megatron.core.transformer.transformer_config"
OVERLAY = "seq-aux-loss-packed"
WIDTH, HIDDEN = PACK.WIDTH, PACK.HIDDEN
RANKS = (2, 4)
SAMPLES = (1, 2, 3, 4)
RECOMPUTED: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def layer(ranks: int, **asked: Any) -> Any:
    """Return the MoE layer of the pack on so many ranks, with other settings."""
    module: Any = importlib.import_module(CONFIG)
    theirs = module.TransformerConfig
    settings = {"tensor_model_parallel_size": ranks, "num_attention_heads": ranks, **asked}
    with mock.patch.object(module, "TransformerConfig", lambda **given: theirs(**{**given, **settings})):
        return PACK._layer()


def row(samples: int, *, packed: bool, width: int = WIDTH, masked: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return this rank's share of samples, and the other arguments of a layer."""
    from megatron.core.packed_seq_params import PackedSeqParams

    generator = torch.Generator().manual_seed(samples)
    apart = 2 * torch.randn(samples, 1, HIDDEN, generator=generator)
    tokens = torch.randn(samples, width, HIDDEN, generator=generator) + apart
    mask = torch.zeros(samples, width, dtype=torch.bool)
    for number in range(samples):
        mask[number, width - number - 1 :] = True
    whole = tokens.reshape(-1, 1, HIDDEN) if packed else tokens.transpose(0, 1).contiguous()
    mask = (mask.reshape(1, -1) if packed else mask).transpose(0, 1).contiguous()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    given: dict[str, Any] = {"padding_mask": mask.chunk(ranks)[rank].transpose(0, 1) if masked else None}
    if packed:
        given["packed_seq_params"] = PackedSeqParams(qkv_format="thd", tokens_per_sample=width)
    return whole.chunk(ranks)[rank].clone().requires_grad_(), given


def log() -> dict[str, Any]:
    found: dict[str, Any] = (
        importlib.import_module("megatron.core.transformer.moe.moe_utils").get_moe_metrics_tracker()._metrics
    )
    return found


def learnt(made: Any) -> dict[str, Any]:
    """Return the logged loss and the gradient of the router, summed over ranks."""
    loss = sum((each.values.sum() for each in log().values()), torch.zeros(()))
    weight = made.mlp.router.weight
    grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    summed = torch.cat([loss.detach().reshape(1), grad.flatten()])
    torch.distributed.all_reduce(summed)
    log().clear()
    weight.grad = None
    return {"loss": float(summed[0]), "gradient": summed[1:].tolist()}


def run(made: Any, samples: int, **asked: Any) -> dict[str, Any]:
    own, given = row(samples, **asked)
    output = made._forward_mlp(own, **given)
    if torch.is_grad_enabled():
        (output * 0.0).sum().backward()
    return {**learnt(made), "output": output.detach().flatten().tolist()}


def two_at_once(made: Any, *batches: dict[str, Any]) -> dict[str, Any]:
    """Run two microbatches forward before either runs backward, as pipeline stages do."""
    outputs = []
    for each in batches:
        own, given = row(**each)
        outputs.append(made._forward_mlp(own, **given))
    for output in outputs:
        (output * 0.0).sum().backward()
    return learnt(made)


def ways(ranks: int) -> dict[str, Any]:
    plain = layer(ranks)
    kinds = {
        "plain": plain,
        "over tokens": layer(ranks, calculate_per_token_loss=True),
        "recomputed": layer(ranks, **RECOMPUTED),
    }
    found: dict[str, Any] = {}
    for packed in (True, False):
        name = "packed" if packed else "batch"
        found[name] = {
            f"{samples}, {kind}": run(made, samples, packed=packed)
            for kind, made in kinds.items()
            for samples in (SAMPLES if kind == "plain" else (3,))
        }
        for kind in ("plain", "over tokens"):
            found[name][f"3, {kind}, masked"] = run(kinds[kind], 3, packed=packed, masked=True)
        found[name]["two at once"] = two_at_once(
            kinds["recomputed"], {"samples": 2, "packed": packed}, {"samples": 3, "packed": packed}
        )
        found[name]["two of one size"] = two_at_once(
            kinds["recomputed"],
            {"samples": 4, "packed": packed},
            {"samples": 2, "packed": packed, "width": 2 * WIDTH},
            {"samples": 1, "packed": packed, "width": 4 * WIDTH},
        )
    for kind in ("plain", "recomputed"):
        found[f"directly, {kind}"] = directly(kinds[kind])
    with torch.no_grad():
        found["without gradients"] = run(plain, 3, packed=True)
    found["not trained"] = run(plain.eval(), 3, packed=True)
    return found


def directly(made: Any) -> dict[str, Any]:
    """Return results where code other than the layer calls its MLP, and a router, with tokens of a packed row that the layer just ran."""
    own, given = row(4, packed=True)
    kept = made._forward_mlp(own, **given)
    (kept * 0.0).sum().backward()
    learnt(made)
    found = {}
    for name, call in {"mlp": made.mlp, "route": made.mlp.route}.items():
        output, *_ = call(own)
        (output * 0.0).sum().backward()
        found[name] = learnt(made)
    return found


def on_a_rank(ranks: int) -> dict[str, Any]:
    importlib.import_module("megatron.core.parallel_state").initialize_model_parallel(tensor_model_parallel_size=ranks)
    answer = {"on": ways(ranks)}
    megacpp_overlays.undo()
    return {**answer, "off": ways(ranks)}


def main() -> None:
    """Answer on standard output."""
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value] # upstream makes tensors there
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda **_: None  # type: ignore[attr-defined] # a recomputation asks for it
    random._set_cuda_rng_state = lambda *_, **__: None  # type: ignore[attr-defined]
    importlib.import_module(PACK.LAYER)
    importlib.import_module("megatron.core.models.gpt.moe_module_specs")
    decisions = [each.decision.value for each in megacpp_overlays.audit().records if each.overlay.id == OVERLAY]
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for ranks in RANKS:
            (meeting := Path(folder, str(ranks))).mkdir()
            found[str(ranks)] = on_ranks(ranks, meeting, lambda _, ranks=ranks: on_a_rank(ranks))[0]
    sys.stdout.write(json.dumps({"decisions": decisions, "found": found}))


if __name__ == "__main__":
    main()
