"""Megatron's `seq_aux_loss` on packed samples that sequence parallelism cuts into shards: is it the mean over samples?

A real MoE layer runs forward and backward on two tensor parallel ranks, which are forked and meet with gloo. It gets three and four
samples once as a batch, with an axis of samples, and once as a packed row. The router's logged loss, and what its weights learn from
it, are to be the same.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent

LAYER = "megatron.core.transformer.transformer_layer"
ROUTER = "megatron.core.transformer.moe.router"
PARAMS = "megatron.core.packed_seq_params"
RANKS, WIDTH, EXPERTS, HIDDEN = 2, 8, 4, 8
SAMPLES = (3, 4)
ROUNDING = 1e-4


def _sequence_parallel() -> Behaviour:
    import torch  # noqa: F401 - once, before the forks

    for name in (LAYER, ROUTER):
        importlib.import_module(name)
    if "tokens_per_sample" not in importlib.import_module(PARAMS).PackedSeqParams.__dataclass_fields__:
        raise TargetAbsent("a packed row does not say how long its samples are")
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_on_rank, args=(rank, folder)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        found = json.loads(Path(folder, "found").read_text())
    words = [f"{each['samples']} samples: loss {each['packed']:.4f}, as a batch {each['batch']:.4f}" for each in found]
    apart = max(each["apart"] for each in found)
    return Behaviour(
        broken=apart > ROUNDING or any(abs(each["packed"] - each["batch"]) > ROUNDING for each in found),
        seen=f"packed on two ranks, {'; '.join(words)}; gradients up to {apart:.4f} apart",
    )


def _on_rank(rank: int, folder: str) -> None:
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"  # where Megatron puts what it makes
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    layer, found = _layer(), []
    for samples in SAMPLES:
        (batch, right), (packed, learnt) = (_trained(layer, samples, packed=each) for each in (False, True))
        apart = float((learnt - right).norm() / right.norm())
        found.append({"samples": samples, "batch": batch, "packed": packed, "apart": apart})
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def _layer() -> Any:
    import torch
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    module = importlib.import_module(LAYER)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=HIDDEN,
        moe_ffn_hidden_size=HIDDEN,
        num_attention_heads=RANKS,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.5,
        tensor_model_parallel_size=RANKS,
        sequence_parallel=True,
        add_bias_linear=False,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
    )
    experts = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    parts = module.TransformerLayerSubmodules(mlp=experts, mlp_bda=get_bias_dropout_add)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = module.TransformerLayer(config, parts, layer_number=1, pg_collection=groups)
    with torch.no_grad():
        for each in layer.parameters():
            each.fill_(0.01)
        layer.mlp.router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(3)))
    return layer.train()


def _trained(layer: Any, samples: int, *, packed: bool) -> tuple[float, Any]:
    """Return the loss that the router logs for all ranks, and what its weights, [experts, hidden], learn from it."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.moe.moe_utils import get_moe_metrics_tracker

    generator = torch.Generator().manual_seed(samples)
    apart = 2 * torch.randn(samples, 1, HIDDEN, generator=generator)
    tokens = torch.randn(samples, WIDTH, HIDDEN, generator=generator) + apart  # samples prefer experts of their own
    whole = tokens.reshape(-1, 1, HIDDEN) if packed else tokens.transpose(0, 1).contiguous()
    own = whole.chunk(RANKS)[torch.distributed.get_rank()].clone().requires_grad_()
    params = PackedSeqParams(qkv_format="thd", tokens_per_sample=WIDTH) if packed else None
    logged = get_moe_metrics_tracker()._metrics  # noqa: SLF001 - of this run alone
    logged.clear()
    weight = layer.mlp.router.weight
    weight.grad = None
    (layer._forward_mlp(own, packed_seq_params=params) * 0.0).sum().backward()  # noqa: SLF001 - MLP without attention
    loss = sum(each.values.sum() for each in logged.values())
    summed = torch.cat([loss.detach().reshape(1), weight.grad.flatten()])
    torch.distributed.all_reduce(summed)
    return float(summed[0]), summed[1:]


CASES = (
    Case(
        name="sequence-parallel-cpu",
        overlay="seq-aux-loss-packed",
        device="cpu",
        versions=("torch",),
        run=_sequence_parallel,
        targets=(LAYER, ROUTER),
    ),
)
