"""Run in a fresh interpreter: padding masks of MoE models, with overlays and without; JSON.

    python tests/support/masked_stages.py

The release is the one that is first on the path. A real router counts tokens of experts, and real models of a first and of a later pipeline
stage prepare masks on two gloo ranks of sequence parallelism. What is compiled runs eagerly.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import megacpp_overlays

# isort: split
import torch
from forked_ranks import on_ranks

ROUTER = "megatron.core.transformer.moe.router"
MODEL = "megatron.core.models.gpt.gpt_model"
IDS = ("expert-bias-padding-mask", "pipeline-padding-mask")
RANKS, TOKENS, ROWS, EXPERTS, HIDDEN = 2, 8, 2, 4, 8
PADDED = (6, 3)
"""From which token on each row is padding."""


def config(ranks: int, **asked: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=HIDDEN,
        moe_ffn_hidden_size=HIDDEN,
        num_attention_heads=RANKS,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
        moe_router_score_function="sigmoid",
        moe_aux_loss_coeff=0.5,
        tensor_model_parallel_size=ranks,
        sequence_parallel=ranks > 1,
        pipeline_dtype=torch.float32,
        add_bias_linear=False,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        **asked,
    )


def groups(ranks: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    return ProcessGroupCollection.use_mpu_process_groups()


def counts(tokens: int, **asked: Any) -> Any:
    """Return what a router counted, what it should have counted, and what its weights learnt."""
    made = importlib.import_module(ROUTER).TopKRouter(
        config(1, moe_router_enable_expert_bias=asked.get("bias", True)), groups(1)
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        made.weight.copy_(torch.randn(made.weight.shape, generator=generator))
    states = torch.randn(tokens // 2, 2, HIDDEN, generator=generator)
    mask = torch.zeros(tokens // 2, 2, dtype=torch.bool)
    mask[1:, 0] = True
    try:
        shares, chosen = made(states, mask if asked.get("masked", True) else None)
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0]}
    shares.sum().backward()
    right = (chosen & ~mask.reshape(-1, 1)).sum(0) if asked.get("masked", True) else chosen.sum(0)
    counted = made.local_tokens_per_expert
    return {
        "counted": None if counted is None else counted.tolist(),
        "right": right.tolist(),
        "gradient": made.weight.grad.flatten().tolist(),
    }


def routed() -> dict[str, Any]:
    return {
        "more tokens": counts(6),
        "as many tokens": counts(EXPERTS),
        "no mask": counts(6, masked=False),
        "no bias": counts(6, bias=False),
    }


def model(made: Any, *, pre_process: bool) -> Any:
    """Return a model of one MoE layer without attention, which ends behind its layers."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()  # of GPUs alone
    experts = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    parts = TransformerLayerSubmodules(mlp=experts, mlp_bda=get_bias_dropout_add)
    return importlib.import_module(MODEL).GPTModel(
        config=config(RANKS),
        transformer_layer_spec=ModuleSpec(module=TransformerLayer, submodules=parts),
        vocab_size=16,
        max_sequence_length=TOKENS,
        pre_process=pre_process,
        post_process=False,
        position_embedding_type="none",
        pg_collection=made,
    )


def mask() -> Any:
    return torch.arange(TOKENS)[None] >= torch.tensor(PADDED)[:, None]


def prepared(made: Any, given: Any, **asked: Any) -> Any:
    """Return the mask that a model hands on, or the error of its preparation."""
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    try:
        return made._preprocess(ids, None, padding_mask=given, **asked)[5].int().tolist()
    except AssertionError as error:
        return str(error)


def staged() -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    states = torch.randn(TOKENS // RANKS, ROWS, HIDDEN, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    own = mask().chunk(RANKS, dim=1)[rank].contiguous()
    shared = groups(RANKS)
    first, later = model(shared, pre_process=True), model(shared, pre_process=False)
    later.set_input_tensor(states)
    found = {
        "right": own.int().tolist(),
        "first": prepared(first, mask()),
        "states given": prepared(first, mask(), decoder_input=states),
        "later": prepared(later, mask()),
        "later, cut before": prepared(later, own),
        "later, of another length": prepared(later, mask()[:, :-1]),
        "later, without a mask": later._preprocess(None, None)[5],
        "rest": [str(type(each)) for each in later._preprocess(None, None, padding_mask=mask())],
    }
    try:
        found["later, run"] = list(later(None, None, None, padding_mask=mask()).shape)
    except RuntimeError as error:
        found["later, run"] = str(error)
    later.set_input_tensor(None)
    found["nothing to compare with"] = prepared(later, mask())
    alone = groups(1)
    alone.tp = torch.distributed.group.WORLD
    elsewhere = model(alone, pre_process=True)
    found["own group"] = prepared(elsewhere, mask())
    found["own group, of another length"] = prepared(elsewhere, mask()[:, :-1])
    return found


def both(find: Any) -> Any:
    """Return what is found with the overlays and then without them."""
    with_overlays = find()
    megacpp_overlays.undo()
    return {"on": with_overlays, "off": find()}


def main() -> None:
    """Answer on standard output."""
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value] # where upstream puts what it makes
    utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    utils.te_general_gemm = getattr(utils, "te_general_gemm", None)  # 0.16 asks for it without Transformer Engine, too
    for each in (ROUTER, MODEL):
        importlib.import_module(each)
    records = {each.overlay.id: each for each in megacpp_overlays.audit().records}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("router", "ranks"):
            Path(folder, name).mkdir()
        found = {
            "decisions": {name: records[name].decision.value for name in IDS},
            "router": on_ranks(1, Path(folder, "router"), lambda _: both(routed))[0],
            "ranks": on_ranks(RANKS, Path(folder, "ranks"), lambda _: both(staged)),
        }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
