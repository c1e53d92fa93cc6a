"""A summary of each declaration of this package, so that arming need not load the declarations: `scripts/list_overlays.py`
writes this file, a test holds it in step, and a process that loads the declarations refuses a list that is not theirs."""

from __future__ import annotations

from megacpp_overlays.frozen import NamedTuple


class DeclarationSummary(NamedTuple):
    """One overlay or gate, with all its parts."""

    id: str
    """Its module below `overlays` has the same name, with `_` for `-`."""
    installs: bool
    """False for a gate."""
    off_by_default: bool
    targets: tuple[str, ...]
    """The modules that it is about."""


LISTED: tuple[DeclarationSummary, ...] = (
    DeclarationSummary(
        id="dsa-branchless-scatter",
        installs=True,
        off_by_default=False,
        targets=(
            "megatron.core.transformer.experimental_attention_variant.dsa",
            "megatron.core.transformer.experimental_attention_variant.dsa_masking",
        ),
    ),
    DeclarationSummary(
        id="dsa-capture-gates",
        installs=True,
        off_by_default=False,
        targets=(
            "megatron.core.transformer.experimental_attention_variant.dsa",
            "megatron.core.transformer.experimental_attention_variant.dsa_layout",
            "megatron.core.transformer.experimental_attention_variant.dsa_masking",
        ),
    ),
    DeclarationSummary(
        id="gdn-capture-gates",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.ssm.gated_delta_net", "megatron.core.ssm.gated_delta_net.common"),
    ),
    DeclarationSummary(
        id="sparse-mla-dimensions",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.experimental_attention_variant.ops.tilelang_dsa",),
    ),
    DeclarationSummary(
        id="fp8-quantized-unwrap",
        installs=True,
        off_by_default=False,
        targets=(
            "megatron.core.transformer.experimental_attention_variant.ops.tilelang_dsa",
            "megatron.core.transformer.experimental_attention_variant.dsa",
        ),
    ),
    DeclarationSummary(
        id="mamba3-mimo-gqa-backward",
        installs=True,
        off_by_default=False,
        targets=(
            "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd",
            "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd_varlen",
        ),
    ),
    DeclarationSummary(
        id="tilelang-bulk-copy-rank",
        installs=False,
        off_by_default=False,
        targets=("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd",),
    ),
    DeclarationSummary(
        id="liger-flce-none-backward",
        installs=True,
        off_by_default=False,
        targets=("liger_kernel.ops.fused_linear_cross_entropy",),
    ),
    DeclarationSummary(
        id="hopper-flce-dispatch",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.fusions.fused_linear_cross_entropy",),
    ),
    DeclarationSummary(
        id="hybrid-linear-ce",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.models.hybrid.hybrid_model",),
    ),
    DeclarationSummary(
        id="dsa-indexer-streaming",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.experimental_attention_variant.dsa",),
    ),
    DeclarationSummary(
        id="tilelang-zero-extent-iterator", installs=False, off_by_default=False, targets=("tilelang.transform",)
    ),
    DeclarationSummary(
        id="float16-distributed-order",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.optimizer.distrib_optimizer",),
    ),
    DeclarationSummary(
        id="float16-fp32-exemption", installs=True, off_by_default=False, targets=("megatron.core.transformer.module",)
    ),
    DeclarationSummary(
        id="float16-optimizer-state-ids",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.optimizer.optimizer",),
    ),
    DeclarationSummary(
        id="mamba3-mimo-reduce-layout",
        installs=False,
        off_by_default=False,
        targets=("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd",),
    ),
    DeclarationSummary(
        id="tilelang-grouped-reduce", installs=False, off_by_default=False, targets=("tilelang.language",)
    ),
    DeclarationSummary(
        id="mamba3-siso-pipelining",
        installs=False,
        off_by_default=False,
        targets=("mamba_ssm.ops.triton.mamba3.mamba3_siso_fwd",),
    ),
    DeclarationSummary(
        id="megatron-cuda-on-import",
        installs=False,
        off_by_default=False,
        targets=("megatron.core.ssm.ops.gdp.common",),
    ),
    DeclarationSummary(
        id="float16-mixer-parameters",
        installs=True,
        off_by_default=True,
        targets=("megatron.core.ssm.mamba_mixer", "megatron.core.ssm.gated_delta_product"),
    ),
    DeclarationSummary(
        id="mamba-packed-seq-idx", installs=True, off_by_default=False, targets=("megatron.core.ssm.mamba_mixer",)
    ),
    DeclarationSummary(
        id="fully-reshardable-padding",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.optimizer.distrib_optimizer",),
    ),
    DeclarationSummary(
        id="mtp-roll-padded-boundaries",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.multi_token_prediction",),
    ),
    DeclarationSummary(
        id="mla-rope-key-gradient",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.multi_latent_attention",),
    ),
    DeclarationSummary(
        id="tp-label-smoothing",
        installs=True,
        off_by_default=True,
        targets=("megatron.core.tensor_parallel.cross_entropy",),
    ),
    DeclarationSummary(
        id="mtp-token-counts-local",
        installs=True,
        off_by_default=True,
        targets=("megatron.core.transformer.multi_token_prediction",),
    ),
    DeclarationSummary(
        id="cp-local-loss-mean",
        installs=True,
        off_by_default=True,
        targets=("megatron.core.pipeline_parallel.schedules",),
    ),
    DeclarationSummary(
        id="mamba2-int32-offsets",
        installs=True,
        off_by_default=False,
        targets=("mamba_ssm.ops.triton.ssd_combined", "mamba_ssm.ops.triton.layernorm_gated"),
    ),
    DeclarationSummary(
        id="hybrid-mtp-aux-loss",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.models.hybrid.hybrid_block",),
    ),
    DeclarationSummary(
        id="mtp-z-loss", installs=True, off_by_default=False, targets=("megatron.core.transformer.moe.router",)
    ),
    DeclarationSummary(
        id="fsdp-optimizer-under-update",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard",),
    ),
    DeclarationSummary(
        id="seq-aux-loss-packed",
        installs=True,
        off_by_default=False,
        targets=(
            "megatron.core.transformer.moe.router",
            "megatron.core.transformer.moe.moe_layer",
            "megatron.core.transformer.transformer_layer",
        ),
    ),
    DeclarationSummary(
        id="latent-moe-fc2-init",
        installs=True,
        off_by_default=True,
        targets=("megatron.core.transformer.mlp", "megatron.core.transformer.moe.experts"),
    ),
    DeclarationSummary(
        id="expert-bias-padding-mask",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.moe.router",),
    ),
    DeclarationSummary(
        id="pipeline-padding-mask", installs=True, off_by_default=False, targets=("megatron.core.models.gpt.gpt_model",)
    ),
    DeclarationSummary(
        id="mla-rope-head-blocks",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.fusions.fused_mla_yarn_rope_apply",),
    ),
    DeclarationSummary(
        id="quant-recipe-stale-weights",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.module",),
    ),
    DeclarationSummary(
        id="tp-attention-sinks",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.attention", "megatron.core.transformer.multi_latent_attention"),
    ),
    DeclarationSummary(
        id="residual-norm-recompute-alias",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.tensor_parallel.random",),
    ),
    DeclarationSummary(
        id="gathered-logits-loss",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.models.common.language_module.language_module",),
    ),
    DeclarationSummary(
        id="graph-hidden-recompute-grads",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.transformer_layer",),
    ),
    DeclarationSummary(
        id="masked-aux-loss-tokens",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.moe.moe_utils",),
    ),
    DeclarationSummary(
        id="tp-norm-gradients",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.distributed.finalize_model_grads",),
    ),
    DeclarationSummary(
        id="triton-register-operands",
        installs=False,
        off_by_default=False,
        targets=("triton.backends.nvidia.compiler",),
    ),
    DeclarationSummary(
        id="explicit-tp-groups",
        installs=True,
        off_by_default=False,
        targets=(
            "megatron.core.utils",
            "megatron.core.transformer.attention",
            "megatron.core.transformer.multi_latent_attention",
            "megatron.core.models.multimodal.llava_model",
            "megatron.core.transformer.multi_token_prediction",
            "megatron.core.recompute",
            "megatron.core.transformer.transformer_block",
            "megatron.core.tensor_parallel.random",
        ),
    ),
    DeclarationSummary(
        id="liger-flce-labelled",
        installs=True,
        off_by_default=True,
        targets=("liger_kernel.ops.fused_linear_cross_entropy",),
    ),
    DeclarationSummary(
        id="dsa-sparse-attention",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.experimental_attention_variant.dsa",),
    ),
    DeclarationSummary(
        id="scheduler-restore",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.optimizer_param_scheduler",),
    ),
    DeclarationSummary(
        id="loss-mask-cache", installs=True, off_by_default=False, targets=("megatron.core.datasets.gpt_dataset",)
    ),
    DeclarationSummary(
        id="qk-clip-negative-head",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.attention", "megatron.core.transformer.multi_latent_attention"),
    ),
    DeclarationSummary(
        id="cpu-offload-reload",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.optimizer.distrib_optimizer",),
    ),
    DeclarationSummary(
        id="expert-rng-resume", installs=True, off_by_default=False, targets=("megatron.training.checkpointing",)
    ),
    DeclarationSummary(
        id="global-aux-loss-scale",
        installs=True,
        off_by_default=True,
        targets=("megatron.core.transformer.moe.router",),
    ),
    DeclarationSummary(
        id="layerwise-norm-groups",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.optimizer.layer_wise_optimizer",),
    ),
    DeclarationSummary(
        id="expert-grad-norm", installs=True, off_by_default=False, targets=("megatron.core.tensor_parallel.layers",)
    ),
    DeclarationSummary(
        id="fsdp-lone-rank-gradients",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer",),
    ),
    DeclarationSummary(
        id="fsdp-reduced-twice",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer",),
    ),
    DeclarationSummary(
        id="liger-flce-frozen-states",
        installs=True,
        off_by_default=False,
        targets=("liger_kernel.transformers.functional", "liger_kernel.transformers.fused_linear_cross_entropy"),
    ),
    DeclarationSummary(
        id="dcp-fresh-optimizer-state",
        installs=True,
        off_by_default=False,
        targets=("torch.distributed.checkpoint.state_dict",),
    ),
    DeclarationSummary(
        id="loss-parallel-log-softmax",
        installs=True,
        off_by_default=False,
        targets=("torch.distributed.tensor.parallel.loss",),
    ),
    DeclarationSummary(
        id="compile-budget-dropout",
        installs=True,
        off_by_default=False,
        targets=("torch._functorch.partitioners", "torch._functorch._aot_autograd.autograd_cache"),
    ),
    DeclarationSummary(
        id="mix-order-reduction-views",
        installs=True,
        off_by_default=False,
        targets=("torch._inductor.scheduler", "torch._inductor.codecache"),
    ),
    DeclarationSummary(
        id="liger-glm4v-norms", installs=True, off_by_default=False, targets=("liger_kernel.transformers.monkey_patch",)
    ),
    DeclarationSummary(
        id="expert-gradient-groups",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.moe.moe_layer",),
    ),
    DeclarationSummary(
        id="trainer-moe-aux-loss", installs=True, off_by_default=True, targets=("transformers.trainer",)
    ),
    DeclarationSummary(
        id="fsdp-decoupled-grad-sums",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.distributed.finalize_model_grads",),
    ),
    DeclarationSummary(
        id="sft-end-of-turn-loss",
        installs=True,
        off_by_default=False,
        targets=("megatron.training.datasets.sft_dataset",),
    ),
    DeclarationSummary(
        id="fsdp2-per-token-loss",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.distributed.torch_fully_sharded_data_parallel",),
    ),
)
"""Every declaration, by pack and id."""
