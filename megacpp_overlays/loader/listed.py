"""A summary of each declaration of this package, so that arming need not load the declarations: `scripts/list_overlays.py`
writes this file, a test holds it in step, and a process that loads the declarations refuses a list that is not theirs."""

from __future__ import annotations

from megacpp_overlays.frozen import NamedTuple


class Listed(NamedTuple):
    """One overlay or gate, with all its parts."""

    id: str
    """Its module below `overlays` has the same name, with `_` for `-`."""
    installs: bool
    """False for a gate."""
    off_by_default: bool
    targets: tuple[str, ...]
    """The modules that it is about."""


LISTED: tuple[Listed, ...] = (
    Listed(
        id="dsa-branchless-scatter",
        installs=True,
        off_by_default=False,
        targets=(
            "megatron.core.transformer.experimental_attention_variant.dsa",
            "megatron.core.transformer.experimental_attention_variant.dsa_masking",
        ),
    ),
    Listed(
        id="dsa-capture-gates",
        installs=True,
        off_by_default=False,
        targets=(
            "megatron.core.transformer.experimental_attention_variant.dsa",
            "megatron.core.transformer.experimental_attention_variant.dsa_layout",
            "megatron.core.transformer.experimental_attention_variant.dsa_masking",
        ),
    ),
    Listed(
        id="gdn-capture-gates",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.ssm.gated_delta_net", "megatron.core.ssm.gated_delta_net.common"),
    ),
    Listed(
        id="sparse-mla-dimensions",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.experimental_attention_variant.ops.tilelang_dsa",),
    ),
    Listed(
        id="fp8-quantized-unwrap",
        installs=True,
        off_by_default=False,
        targets=(
            "megatron.core.transformer.experimental_attention_variant.ops.tilelang_dsa",
            "megatron.core.transformer.experimental_attention_variant.dsa",
        ),
    ),
    Listed(
        id="mamba3-mimo-gqa-backward",
        installs=True,
        off_by_default=False,
        targets=(
            "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd",
            "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd_varlen",
        ),
    ),
    Listed(
        id="tilelang-bulk-copy-rank",
        installs=False,
        off_by_default=False,
        targets=("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd",),
    ),
    Listed(
        id="liger-flce-none-backward",
        installs=True,
        off_by_default=False,
        targets=("liger_kernel.ops.fused_linear_cross_entropy",),
    ),
    Listed(
        id="hopper-flce-dispatch",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.fusions.fused_linear_cross_entropy",),
    ),
    Listed(
        id="hybrid-linear-ce",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.models.hybrid.hybrid_model",),
    ),
    Listed(
        id="dsa-indexer-streaming",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.experimental_attention_variant.dsa",),
    ),
    Listed(id="tilelang-zero-extent-iterator", installs=False, off_by_default=False, targets=("tilelang.transform",)),
    Listed(
        id="float16-distributed-order",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.optimizer.distrib_optimizer",),
    ),
    Listed(
        id="float16-fp32-exemption", installs=True, off_by_default=False, targets=("megatron.core.transformer.module",)
    ),
    Listed(
        id="float16-optimizer-state-ids",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.optimizer.optimizer",),
    ),
    Listed(
        id="mamba3-mimo-reduce-layout",
        installs=False,
        off_by_default=False,
        targets=("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd",),
    ),
    Listed(id="tilelang-grouped-reduce", installs=False, off_by_default=False, targets=("tilelang.language",)),
    Listed(
        id="mamba3-siso-pipelining",
        installs=False,
        off_by_default=False,
        targets=("mamba_ssm.ops.triton.mamba3.mamba3_siso_fwd",),
    ),
    Listed(
        id="megatron-cuda-on-import",
        installs=False,
        off_by_default=False,
        targets=("megatron.core.ssm.ops.gdp.common",),
    ),
    Listed(
        id="float16-mixer-parameters",
        installs=True,
        off_by_default=True,
        targets=("megatron.core.ssm.mamba_mixer", "megatron.core.ssm.gated_delta_product"),
    ),
    Listed(id="mamba-packed-seq-idx", installs=True, off_by_default=False, targets=("megatron.core.ssm.mamba_mixer",)),
    Listed(
        id="fully-reshardable-padding",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.optimizer.distrib_optimizer",),
    ),
    Listed(
        id="mtp-roll-padded-boundaries",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.multi_token_prediction",),
    ),
    Listed(
        id="mla-rope-key-gradient",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.multi_latent_attention",),
    ),
    Listed(
        id="tp-label-smoothing",
        installs=True,
        off_by_default=True,
        targets=("megatron.core.tensor_parallel.cross_entropy",),
    ),
    Listed(
        id="mtp-token-counts-local",
        installs=True,
        off_by_default=True,
        targets=("megatron.core.transformer.multi_token_prediction",),
    ),
    Listed(
        id="cp-local-loss-mean",
        installs=True,
        off_by_default=True,
        targets=("megatron.core.pipeline_parallel.schedules",),
    ),
    Listed(
        id="mamba2-int32-offsets",
        installs=True,
        off_by_default=False,
        targets=("mamba_ssm.ops.triton.ssd_combined", "mamba_ssm.ops.triton.layernorm_gated"),
    ),
    Listed(
        id="hybrid-mtp-aux-loss",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.models.hybrid.hybrid_block",),
    ),
    Listed(id="mtp-z-loss", installs=True, off_by_default=False, targets=("megatron.core.transformer.moe.router",)),
    Listed(
        id="fsdp-optimizer-under-update",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard",),
    ),
    Listed(
        id="seq-aux-loss-packed",
        installs=True,
        off_by_default=False,
        targets=(
            "megatron.core.transformer.moe.router",
            "megatron.core.transformer.moe.moe_layer",
            "megatron.core.transformer.transformer_layer",
        ),
    ),
    Listed(
        id="latent-moe-fc2-init",
        installs=True,
        off_by_default=True,
        targets=("megatron.core.transformer.mlp", "megatron.core.transformer.moe.experts"),
    ),
    Listed(
        id="expert-bias-padding-mask",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.moe.router",),
    ),
    Listed(
        id="pipeline-padding-mask", installs=True, off_by_default=False, targets=("megatron.core.models.gpt.gpt_model",)
    ),
    Listed(
        id="mla-rope-head-blocks",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.fusions.fused_mla_yarn_rope_apply",),
    ),
    Listed(
        id="quant-recipe-stale-weights",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.module",),
    ),
    Listed(
        id="tp-attention-sinks",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.attention", "megatron.core.transformer.multi_latent_attention"),
    ),
    Listed(
        id="residual-norm-recompute-alias",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.tensor_parallel.random",),
    ),
    Listed(
        id="gathered-logits-loss",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.models.common.language_module.language_module",),
    ),
    Listed(
        id="graph-hidden-recompute-grads",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.transformer_layer",),
    ),
    Listed(
        id="masked-aux-loss-tokens",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.moe.moe_utils",),
    ),
    Listed(
        id="tp-norm-gradients",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.distributed.finalize_model_grads",),
    ),
    Listed(
        id="triton-register-operands",
        installs=False,
        off_by_default=False,
        targets=("triton.backends.nvidia.compiler",),
    ),
    Listed(
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
    Listed(
        id="liger-flce-labelled",
        installs=True,
        off_by_default=True,
        targets=("liger_kernel.ops.fused_linear_cross_entropy",),
    ),
    Listed(
        id="dsa-sparse-attention",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.experimental_attention_variant.dsa",),
    ),
    Listed(
        id="scheduler-restore",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.optimizer_param_scheduler",),
    ),
    Listed(id="loss-mask-cache", installs=True, off_by_default=False, targets=("megatron.core.datasets.gpt_dataset",)),
    Listed(
        id="qk-clip-negative-head",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.transformer.attention", "megatron.core.transformer.multi_latent_attention"),
    ),
    Listed(
        id="cpu-offload-reload",
        installs=True,
        off_by_default=False,
        targets=("megatron.core.optimizer.distrib_optimizer",),
    ),
    Listed(id="expert-rng-resume", installs=True, off_by_default=False, targets=("megatron.training.checkpointing",)),
    Listed(
        id="global-aux-loss-scale",
        installs=True,
        off_by_default=True,
        targets=("megatron.core.transformer.moe.router",),
    ),
)
"""Every declaration, by pack and id."""
