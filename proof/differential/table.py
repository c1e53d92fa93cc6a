"""The table: one row for a configuration. Overlays are in it by being called; nothing here names one."""

from __future__ import annotations

from dataclasses import replace

from differential.rows import Packing, Row

DOCUMENTS = Packing((8, 8), (8, 8))
SAMPLES = Packing((8, 8, 8, 8), (8, 8, 8, 8), has_samples=True)
PADDED = Packing((6, 6), (8, 8))
PER_TOKEN = {"calculate_per_token_loss": True}
BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
BY_SAMPLE = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}
REPEATED = {"mtp_use_repeated_layer": True}
SINKS = {"softmax_type": "learnable"}
NORMS = {"qk_layernorm": True}
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}

GPT = Row("gpt", "*-*E", model="gpt")
LATENT = Row("latent attention", "+-+E", model="gpt", config=NORMS)
HYBRID = Row("hybrid", "M*-GE")
SPARSE = Row("sparse attention", "D-D-")
PREDICTING = Row("predictions", "*-*-/*E/*E", model="gpt", config=REPEATED)

ROWS = (
    replace(GPT, name="GPT with experts, one rank"),
    replace(LATENT, name="latent attention, one rank"),
    replace(HYBRID, name="Mamba-2, attention, gated delta net, experts, one rank"),
    replace(SPARSE, name="sparse attention, one rank"),
    replace(
        SPARSE,
        name="sparse attention, loss of the indexer over chosen keys",
        config={"dsa_indexer_use_sparse_loss": True},
    ),
    replace(
        GPT,
        name="recompute, full",
        config={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    replace(
        LATENT,
        name="recompute, selective",
        config={
            **NORMS,
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn", "mla_up_proj", "layernorm", "moe", "mlp"],
        },
    ),
    replace(GPT, name="four microbatches", microbatches=4),
    replace(
        GPT,
        name="four microbatches, loss of each token, padding mask",
        microbatches=4,
        padding=(5, 2),
        config=PER_TOKEN,
    ),
    replace(GPT, name="eval", mode="eval"),
    replace(HYBRID, name="no_grad", mode="no_grad"),
    replace(GPT, name="two models in turn", other=replace(LATENT, padding=(5, 2), config={**NORMS, **PER_TOKEN})),
    replace(
        GPT,
        name="tied and frozen weights",
        build={"share_embeddings_and_output_weights": True},
        frozen=("linear_qkv", "router"),
    ),
    replace(LATENT, name="latent attention, subclasses", subclassed=True),
    replace(HYBRID, name="hybrid, subclasses", subclassed=True),
    replace(GPT, name="float16 with loss scaling", pattern="*-*-", dtype="float16"),
    replace(GPT, name="bfloat16", pattern="*-*-", dtype="bfloat16"),
    replace(
        HYBRID, name="packed row", pattern="M*-", packing=DOCUMENTS, config=PER_TOKEN, truth={"documents_alone": True}
    ),
    replace(
        PREDICTING,
        name="packed and padded row, predictions",
        pattern="*-*-/*-",
        packing=PADDED,
        config=PER_TOKEN,
        truth={"documents_alone": True},
    ),
    replace(
        PREDICTING,
        name="repeated predictions, GPT, z-loss",
        config={**REPEATED, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.1},
        truth={"config": {"moe_z_loss_coeff": 0.05}},
    ),
    replace(
        PREDICTING,
        name="repeated predictions, hybrid, balancing loss",
        model="hybrid",
        left_out=("logged",),
        truth={"config": {"moe_aux_loss_coeff": 0.05}},
    ),
    replace(
        GPT,
        name="expert bias, padding mask",
        padding=(5, 2),
        config={**BIASED, **BALANCED},
        truth={"config": {"moe_router_enable_expert_bias": False}},
    ),
    replace(GPT, name="TP", pattern="*-*-", tp=2),
    replace(
        GPT,
        name="TP, attention sinks, norms of queries",
        tp=2,
        attention="local",
        pattern="*-*-",
        config={**SINKS, **NORMS},
    ),
    replace(
        GPT,
        name="TP, attention sinks alone learn",
        tp=2,
        attention="local",
        pattern="*-*-",
        config=SINKS,
        frozen=("embedding", "linear", "norm", "output_layer"),
    ),
    replace(
        GPT, name="TP, gathered logits", tp=2, pattern="*-*-", build={"parallel_output": False}, truth={"build": {}}
    ),
    replace(LATENT, name="TP, latent attention", pattern="+-+-", tp=2),
    replace(LATENT, name="TP, latent attention, subclasses", pattern="+-+-", tp=2, subclassed=True),
    replace(HYBRID, name="TP, hybrid", pattern="M*-G", tp=2),
    replace(SPARSE, name="TP with SP, sparse attention", tp=2, sequence_parallel=True),
    replace(GPT, name="TP with SP", tp=2, sequence_parallel=True),
    replace(LATENT, name="TP with SP, latent attention", tp=2, sequence_parallel=True),
    replace(HYBRID, name="TP with SP, hybrid", tp=2, sequence_parallel=True),
    replace(
        GPT,
        name="TP with SP, packed samples, balanced by sample",
        tp=2,
        sequence_parallel=True,
        packing=SAMPLES,
        config=BY_SAMPLE,
    ),
    replace(
        GPT,
        name="TP with SP, padding mask, loss of each token",
        tp=2,
        sequence_parallel=True,
        padding=(5, 2),
        config={**PER_TOKEN, **BALANCED},
    ),
    replace(
        GPT,
        name="TP, recompute shared out over ranks",
        pattern="*-*-",
        tp=2,
        config={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "distribute_saved_activations": True,
        },
    ),
    replace(
        LATENT,
        name="TP in groups of the model's own",
        pattern="+-+-",
        tp=2,
        own_groups=True,
        left_out=("gradient norm", "step of"),
        config={
            **NORMS,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "distribute_saved_activations": True,
        },
    ),
    replace(GPT, name="CP", cp=2),
    replace(LATENT, name="CP, latent attention", cp=2),
    replace(HYBRID, name="CP, hybrid", cp=2),
    replace(SPARSE, name="CP, sparse attention", cp=2, frozen=("indexer",), config={"cp_comm_type": "allgather"}),
    replace(
        HYBRID,
        name="CP, packed row",
        pattern="M*-",
        cp=2,
        packing=DOCUMENTS,
        config=PER_TOKEN,
        truth={"documents_alone": True},
    ),
    replace(
        GPT,
        name="PP, tied weights",
        pattern="*-|*E",
        pp=2,
        microbatches=2,
        build={"share_embeddings_and_output_weights": True},
    ),
    replace(HYBRID, name="PP, hybrid", pattern="M*-|GE", pp=2, microbatches=2),
    replace(PREDICTING, name="PP, predictions", pattern="*-|*-/*-", pp=2, microbatches=2),
    replace(GPT, name="EP", ep=2, dp=2, microbatches=2),
    replace(
        GPT,
        name="DP, distributed optimizer, a checkpoint between steps",
        pattern="*-*-",
        dp=2,
        microbatches=2,
        distributed=True,
        steps=2,
        checkpoint=True,
        left_out=("gradient of",),
    ),
    replace(
        GPT,
        name="bfloat16 with parameters in fp32, a checkpoint between steps",
        pattern="*-*-",
        dtype="bfloat16",
        in_fp32=("norm",),
        steps=2,
        checkpoint=True,
    ),
    replace(
        GPT,
        name="DP, distributed optimizer, bfloat16 with parameters in fp32, a checkpoint between steps",
        pattern="*-*-",
        dp=2,
        microbatches=2,
        dtype="bfloat16",
        in_fp32=("norm",),
        distributed=True,
        steps=2,
        checkpoint=True,
        left_out=("gradient of",),
    ),
    replace(
        GPT,
        name="TP with SP, PP, padding mask",
        pattern="*-|*E",
        tp=2,
        sequence_parallel=True,
        pp=2,
        microbatches=2,
        padding=(5, 2),
        config=PER_TOKEN,
    ),
    replace(GPT, name="TP with SP, EP", tp=2, sequence_parallel=True, dp=2, ep=2, microbatches=2, full=True),
    replace(GPT, name="TP, CP", pattern="*-*-", tp=2, cp=2, full=True),
    replace(HYBRID, name="TP with SP, CP, hybrid", tp=2, sequence_parallel=True, cp=2, full=True),
)
